#include "arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>

#include "status.h"

namespace emu::arena {
namespace {

// Names by which other processes find the files in /proc/<pid>/fd, so nothing remains when the process ends.
constexpr char kMemory[] = "ascend-emulator-memory", kParts[] = "ascend-emulator-parts";

// Record of a shared range, in a file that other processes map.
struct Record {
  uint64_t offset, bytes;
  std::atomic<uint32_t> offered;    // may be opened
  std::atomic<uint32_t> abandoned;  // freed by its owner
  std::atomic<uint32_t> holders;    // processes that have it open
  uint32_t to_everybody, allowed;
  int32_t process[119];
};
static_assert(sizeof(Record) == 512);
constexpr uint64_t kRecords = 1 << 20;  // sparse file of 512 MiB

std::mutex mutex;

int create(const char* name) {
  const int file = memfd_create(name, MFD_CLOEXEC);
  check(file >= 0, kOutOfMemory, "cannot create a memory file: ", std::strerror(errno));
  return file;
}

int memory() {
  static const int file = create(kMemory);
  return file;
}

Record* map_records(int file) {
  void* at = mmap(nullptr, kRecords * sizeof(Record), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  check(at != MAP_FAILED, kOutOfMemory, "cannot map a memory file: ", std::strerror(errno));
  return static_cast<Record*>(at);
}

Record* own_records() {
  static Record* const records = [] {
    const int file = create(kParts);
    check(ftruncate(file, kRecords * sizeof(Record)) == 0, kOutOfMemory, "cannot enlarge a memory file: ", std::strerror(errno));
    return map_records(file);
  }();
  return records;
}

// Opens the file of that name of another process; the caller closes the descriptor.
int file_of(int process, const char* name) {
  const auto target = text("/memfd:", name, " (deleted)");
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(text("/proc/", process, "/fd"), error)) {
    if (std::filesystem::read_symlink(entry.path(), error) != target) continue;
    const int file = ::open(entry.path().c_str(), O_RDWR | O_CLOEXEC);
    if (file >= 0) return file;
  }
  throw Error(kInvalidParam, text("process ", process, " shares no memory: it ended, or belongs to another user or container"));
}

int owner(uint64_t key) { return static_cast<int>(key >> 32); }

Record& own(uint64_t key) {
  const auto number = key & 0xffffffff;
  check(owner(key) == getpid() && number < kRecords && own_records()[number].bytes, kInvalidParam, "nothing was exported under ",
      key, " by this process");
  return own_records()[number];
}

// Scope that maps another process's records.
struct Records {
  explicit Records(int process) {
    const int file = file_of(process, kParts);
    all = map_records(file);
    close(file);
  }
  Records(const Records&) = delete;
  ~Records() { munmap(all, kRecords * sizeof(Record)); }
  Record* all;
};

void punch(int file, uint64_t offset, uint64_t bytes) {
  fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(bytes));
}

}  // namespace

namespace {
std::map<uint64_t, uint64_t> free_ranges;  // offset -> bytes, coalesced
uint64_t rounded(uint64_t bytes) {
  constexpr uint64_t huge = 2u << 20;  // ranges are aligned for huge pages
  return (bytes + huge - 1) / huge * huge;
}
}  // namespace

uint64_t allocate(uint64_t bytes) {
  static uint64_t end = 0;
  bytes = rounded(bytes);
  std::lock_guard lock(mutex);
  for (auto range = free_ranges.begin(); range != free_ranges.end(); ++range) {
    if (range->second < bytes) continue;
    const auto [offset, size] = *range;
    free_ranges.erase(range);
    if (size > bytes) free_ranges[offset + bytes] = size - bytes;
    return offset;
  }
  const uint64_t offset = end, next = end + bytes;
  check(ftruncate(memory(), static_cast<off_t>(next)) == 0, kOutOfMemory, "cannot enlarge a memory file: ", std::strerror(errno));
  end = next;
  return offset;
}

void release(uint64_t offset, uint64_t bytes) {
  punch(memory(), offset, bytes);
  std::lock_guard lock(mutex);
  const auto range = free_ranges.emplace(offset, rounded(bytes)).first;
  if (const auto next = std::next(range); next != free_ranges.end() && offset + range->second == next->first) {
    range->second += next->second;
    free_ranges.erase(next);
  }
  if (range == free_ranges.begin()) return;
  if (const auto previous = std::prev(range); previous->first + previous->second == offset) {
    previous->second += range->second;
    free_ranges.erase(range);
  }
}

void write(uint64_t offset, const void* from, uint64_t bytes) {
  while (bytes > 0) {
    const ssize_t done = pwrite(memory(), from, bytes, static_cast<off_t>(offset));
    check(done > 0, kOutOfMemory, "no host memory for ", bytes, " bytes: ", std::strerror(errno));
    from = static_cast<const char*>(from) + done;
    offset += done;
    bytes -= done;
  }
}

void map(void* at, int file, uint64_t offset, uint64_t bytes) {
  const void* done =
      mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file, static_cast<off_t>(offset));
  check(done != MAP_FAILED, kOutOfMemory, "cannot map ", bytes, " bytes: ", std::strerror(errno));
  madvise(at, bytes, MADV_HUGEPAGE);
}
void map(void* at, uint64_t offset, uint64_t bytes) { map(at, memory(), offset, bytes); }

void unmap(void* at, uint64_t bytes) {
  mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  madvise(at, bytes, MADV_HUGEPAGE);
}

uint64_t publish(uint64_t offset, uint64_t bytes) {
  static uint64_t next = 0;
  std::lock_guard lock(mutex);
  memory();
  check(next < kRecords, kOutOfMemory, kRecords, " parts of memory have been shared, which is the most");
  auto& record = own_records()[next];
  record.offset = offset;
  record.bytes = bytes;
  return static_cast<uint64_t>(getpid()) << 32 | next++;
}

void offer(uint64_t key, bool to_everybody) {
  auto& record = own(key);
  record.to_everybody = to_everybody;
  record.offered = 1;
}

void allow(uint64_t key, const int32_t* processes, size_t count) {
  std::lock_guard lock(mutex);
  auto& record = own(key);
  constexpr size_t most = std::size(Record{}.process);
  check(record.allowed + count <= most, kInvalidParam, "more than ", most, " processes");
  std::copy(processes, processes + count, record.process + record.allowed);
  record.allowed += count;
}

void withdraw(uint64_t key) { own(key).offered = 0; }

void abandon(uint64_t key) {
  auto& record = own(key);
  record.offered = 0;
  record.abandoned = 1;
  if (record.holders == 0) release(record.offset, record.bytes);
}

Import open(uint64_t key) {
  const Records records(owner(key));
  const auto number = key & 0xffffffff;
  check(number < kRecords, kInvalidParam, key, " is no shared memory");
  auto& record = records.all[number];
  ++record.holders;  // before reading `offered`; abandon() uses the opposite order
  try {
    check(record.offered, kInvalidParam, "process ", owner(key), " does not share memory under ", key, " any more");
    const int32_t *first = record.process, *end = first + record.allowed;
    check(record.to_everybody || std::find(first, end, getpid()) != end, kNoPermission, "process ", getpid(),
        " is not in the list of those that may use it");
    return {file_of(owner(key), kMemory), record.offset, record.bytes, key};
  } catch (...) {
    --record.holders;
    throw;
  }
}

void close_import(const Import& import) {
  try {
    const Records records(owner(import.key));
    auto& record = records.all[import.key & 0xffffffff];
    if (--record.holders == 0 && record.abandoned) punch(import.file, import.offset, import.bytes);
  } catch (const Error&) {  // the owner has exited
  }
  close(import.file);
}

}  // namespace emu::arena
