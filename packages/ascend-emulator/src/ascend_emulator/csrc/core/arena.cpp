// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
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
#include <random>
#include <set>

#include "process.h"
#include "status.h"

namespace emu::arena {
namespace {

// Names by which other processes find the files in /proc/<pid>/fd, so nothing remains when the
// process ends.
constexpr char kMemory[] = "ascend-emulator-memory";

// Record of a shared range, in a file that other processes map. A process that has the range open
// holds a read lock of the record's first byte in that file, which ends with the process; who frees
// the range holds the write lock. So exactly one side frees it.
struct Record {
  uint64_t offset, bytes;
  std::atomic<uint32_t> offered;    // may be opened
  std::atomic<uint32_t> abandoned;  // freed by its owner
  uint32_t to_everybody, allowed;
  int32_t process[120];
};
static_assert(sizeof(Record) == 512);
constexpr uint64_t kRecords = 1 << 20;  // sparse file of 512 MiB

// A key is `nonce | process | index of the record`. The nonce tells processes apart that have the
// same number, one after the other.
constexpr int kIndexBits = 20, kProcessBits = 22;  // Linux has at most 2^22 processes
static_assert(kRecords == 1 << kIndexBits);
uint64_t index_of(uint64_t key) { return key & (kRecords - 1); }
uint64_t nonce_of(uint64_t key) { return key >> (kIndexBits + kProcessBits); }
uint64_t own_nonce() {
  static const uint64_t nonce = std::random_device{}() >> (kIndexBits + kProcessBits - 32);
  return nonce;
}
std::string parts_name(uint64_t nonce) { return text("ascend-emulator-parts-", nonce); }

struct Arena {
  std::mutex mutex;
  std::map<uint64_t, uint64_t> free_ranges;  // offset -> bytes, coalesced
  uint64_t end = 0;                          // of the file
  uint64_t next = 0;                         // unused record
  std::mutex lent_mutex;
  std::set<uint64_t>
      lent;  // keys of ranges that were abandoned while other processes had them open
};
Arena& all() { return process.part<Arena>(); }

int create(const std::string& name) {
  const int file = memfd_create(name.c_str(), MFD_CLOEXEC);
  check(file >= 0, kOutOfMemory, "cannot create a memory file: ", std::strerror(errno));
  return file;
}

int memory() {
  static const int file = create(kMemory);
  return file;
}

Record* map_records(int file) {
  void* at = mmap(nullptr, kRecords * sizeof(Record), PROT_READ | PROT_WRITE,
      MAP_SHARED | MAP_NORESERVE, file, 0);
  check(at != MAP_FAILED, kOutOfMemory, "cannot map a memory file: ", std::strerror(errno));
  return static_cast<Record*>(at);
}

int own_parts() {
  static const int file = [] {
    const int made = create(parts_name(own_nonce()));
    check(ftruncate(made, kRecords * sizeof(Record)) == 0, kOutOfMemory,
        "cannot enlarge a memory file: ", std::strerror(errno));
    return made;
  }();
  return file;
}

Record* own_records() {
  static Record* const records = map_records(own_parts());
  return records;
}

// Locks the record's byte, or changes the lock that the file has; false if another file's lock is
// in the way.
bool lock(int parts, uint64_t key, short type) {
  struct flock range{};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = static_cast<off_t>(index_of(key) * sizeof(Record));
  range.l_len = 1;
  return fcntl(parts, F_OFD_SETLK, &range) == 0;
}

// Opens the file of that name of another process; the caller closes the descriptor.
int file_of(int process, const std::string& name) {
  const auto target = text("/memfd:", name, " (deleted)");
  std::error_code error;
  for (const auto& entry :
      std::filesystem::directory_iterator(text("/proc/", process, "/fd"), error)) {
    if (std::filesystem::read_symlink(entry.path(), error) != target) continue;
    const int file = ::open(entry.path().c_str(), O_RDWR | O_CLOEXEC);
    if (file >= 0) return file;
  }
  raise(kInvalidParam, {"process ", process,
                           " shares no memory: it ended, or belongs to another user or container"});
}

Record& own(uint64_t key) {
  check(
      owner(key) == getpid() && nonce_of(key) == own_nonce() && own_records()[index_of(key)].bytes,
      kInvalidParam, "nothing was exported under ", key, " by this process");
  return own_records()[index_of(key)];
}

// Scope that maps another process's records.
struct Records {
  explicit Records(int file) : all(map_records(file)) {}
  Records(const Records&) = delete;
  ~Records() { munmap(all, kRecords * sizeof(Record)); }
  Record* all;
};

void punch(int file, uint64_t offset, uint64_t bytes) {
  fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
      static_cast<off_t>(bytes));
}

}  // namespace

namespace {
// Releases the abandoned ranges that no other process has open any more.
void release_unheld() {
  std::lock_guard locked(all().lent_mutex);
  std::erase_if(all().lent, [](uint64_t key) {
    if (!lock(own_parts(), key, F_WRLCK)) return false;
    release(own(key).offset, own(key).bytes);
    return lock(own_parts(), key, F_UNLCK);
  });
}

uint64_t rounded(uint64_t bytes) {
  constexpr uint64_t huge = 2u << 20;  // ranges are aligned for huge pages
  return (bytes + huge - 1) / huge * huge;
}
}  // namespace

int owner(uint64_t key) { return static_cast<int>(key >> kIndexBits & ((1 << kProcessBits) - 1)); }

uint64_t allocate(uint64_t bytes) {
  release_unheld();
  bytes = rounded(bytes);
  std::lock_guard lock(all().mutex);
  for (auto range = all().free_ranges.begin(); range != all().free_ranges.end(); ++range) {
    if (range->second < bytes) continue;
    const auto [offset, size] = *range;
    all().free_ranges.erase(range);
    if (size > bytes) all().free_ranges[offset + bytes] = size - bytes;
    return offset;
  }
  const uint64_t offset = all().end, next = offset + bytes;
  check(ftruncate(memory(), static_cast<off_t>(next)) == 0, kOutOfMemory,
      "cannot enlarge a memory file: ", std::strerror(errno));
  all().end = next;
  return offset;
}

void release(uint64_t offset, uint64_t bytes) {
  punch(memory(), offset, bytes);
  std::lock_guard lock(all().mutex);
  const auto range = all().free_ranges.emplace(offset, rounded(bytes)).first;
  if (const auto next = std::next(range);
      next != all().free_ranges.end() && offset + range->second == next->first) {
    range->second += next->second;
    all().free_ranges.erase(next);
  }
  if (range == all().free_ranges.begin()) return;
  if (const auto previous = std::prev(range); previous->first + previous->second == offset) {
    previous->second += range->second;
    all().free_ranges.erase(range);
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
  const void* done = mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
      file, static_cast<off_t>(offset));
  check(done != MAP_FAILED, kOutOfMemory, "cannot map ", bytes, " bytes: ", std::strerror(errno));
  madvise(at, bytes, MADV_HUGEPAGE);
}
void map(void* at, uint64_t offset, uint64_t bytes) { map(at, memory(), offset, bytes); }

void unmap(void* at, uint64_t bytes) {
  mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE,
      -1, 0);
  madvise(at, bytes, MADV_HUGEPAGE);
}

uint64_t publish(uint64_t offset, uint64_t bytes) {
  std::lock_guard lock(all().mutex);
  memory();
  check(all().next < kRecords, kOutOfMemory, kRecords,
      " parts of memory have been shared, which is the most");
  auto& record = own_records()[all().next];
  record.offset = offset;
  record.bytes = bytes;
  return own_nonce() << (kIndexBits + kProcessBits) |
         static_cast<uint64_t>(getpid()) << kIndexBits | all().next++;
}

void offer(uint64_t key, bool to_everybody) {
  auto& record = own(key);
  record.to_everybody = to_everybody;
  record.offered = 1;
}

void allow(uint64_t key, const int32_t* processes, size_t count) {
  std::lock_guard lock(all().mutex);
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
  {
    std::lock_guard locked(all().lent_mutex);
    all().lent.insert(key);
  }
  release_unheld();
}

Import open(uint64_t key) {
  Import import{-1, file_of(owner(key), parts_name(nonce_of(key))), 0, 0, key};
  try {
    const Records records(import.parts);
    auto& record = records.all[index_of(key)];
    // Before `offered` is read: abandon() changes that before it tries to lock.
    check(lock(import.parts, key, F_RDLCK) && record.offered, kInvalidParam, "process ", owner(key),
        " does not share memory under ", key, " any more");
    const int32_t *first = record.process, *end = first + record.allowed;
    check(record.to_everybody || std::find(first, end, getpid()) != end, kNoPermission, "process ",
        getpid(), " is not in the list of those that may use it");
    import.offset = record.offset;
    import.bytes = record.bytes;
    import.file = file_of(owner(key), kMemory);
    return import;
  } catch (...) {
    close(import.parts);  // and unlocks
    throw;
  }
}

void close_import(const Import& import) {
  // The write lock excludes the owner, which releases the range afterwards, and other processes
  // that have it open.
  const Records records(import.parts);
  if (records.all[index_of(import.key)].abandoned && lock(import.parts, import.key, F_WRLCK))
    punch(import.file, import.offset, import.bytes);
  close(import.file);
  close(import.parts);
}

}  // namespace emu::arena
