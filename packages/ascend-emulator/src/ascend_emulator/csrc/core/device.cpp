// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "device.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <set>
#include <utility>
#include <variant>

#include "arena.h"
#include "host_access.h"
#include "host_memory.h"
#include "virtual_memory.h"

namespace emu {
namespace {

constexpr uint64_t kGranule =
    4096;  // page size, so that each allocation can be shared and freed separately
constexpr uint64_t kReturnPages = 1u
                                  << 20;  // freed blocks of at least this size return their pages
// Address space for virtual memory. torch_npu reserves 9/8 of an NPU's memory for each expandable
// segment, one per stream and pool.
constexpr uint64_t kVirtualPerMemory = 16, kVirtualMost = 16ull << 40;

uint64_t number(const char* variable, uint64_t otherwise) {
  const char* value = std::getenv(variable);
  return value && *value ? std::strtoull(value, nullptr, 10) : otherwise;
}

// ASCEND_RT_VISIBLE_DEVICES, as CANN documents it and torch_npu parses it
// (torch_npu/npu/__init__.py, device_count): a list of ids; the first invalid id ends it. No NPU
// is visible if the ids do not ascend. A process that only counts reserves no address space.
std::vector<int> visible() {
  const int npus = npu_count();
  std::vector<int> ids;
  const char* list = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (!list) {
    for (int id = 0; id < npus; ++id) ids.push_back(id);
    return ids;
  }
  long last = -1;
  for (const char* at = list; std::isdigit(static_cast<unsigned char>(*at)); ++at) {
    char* end = nullptr;
    const long id = std::strtol(at, &end, 10);
    if (id <= last) return {};
    if (id >= npus) break;
    last = id;
    ids.push_back(static_cast<int>(id));
    if (*end != ',') break;
    at = end;
  }
  return ids;
}

struct Machine {
  Chip chip;
  std::vector<std::unique_ptr<Device>> devices;
  uintptr_t device_base = 0, kernel_base = 0, memory = 0,
            bytes = 0;  // both views: the NPUs' memory, then virtual address space

  Machine() {
    if (const char* name = std::getenv("ASCEND_EMULATOR_SOC")) chip.name = name;
    chip.memory = number("ASCEND_EMULATOR_MEMORY", 4ull << 30) & ~((1ull << 21) - 1);
    describe();
    int parts[3] = {};
    if (const char* driver = std::getenv("ASCEND_EMULATOR_DRIVER"))
      if (std::sscanf(driver, "%d.%d.%d", &parts[0], &parts[1], &parts[2]) >= 2)
        chip.driver = parts[0] * 10000 + parts[1] * 100 + parts[2];
    const int npus = npu_count();
    memory = chip.memory * npus;
    bytes = memory + std::min(memory * kVirtualPerMemory, kVirtualMost);
    device_base = map(PROT_NONE);
    kernel_base = map(PROT_NONE);
    // Fails where the kernel does not overcommit memory (vm.overcommit_memory is 2).
    if (mprotect(reinterpret_cast<void*>(kernel_base), memory, PROT_READ | PROT_WRITE) != 0) {
      fprintf(stderr,
          "ascend-emulator: cannot map %llu bytes for %d NPUs: %s; use a smaller --memory\n",
          static_cast<unsigned long long>(memory), npus, std::strerror(errno));
      std::abort();
    }
    madvise(reinterpret_cast<void*>(kernel_base), memory, MADV_HUGEPAGE);
    const auto owner = [](const void* address) -> host_access::Owner {
      const auto [first, length, npu] = allocation_at(address);
      return {first, length, npu};
    };
    host_access::reserved(device_base, bytes, {owner, host_memory::allocated});
    virtual_memory::initialize(
        device_base + memory, bytes - memory, static_cast<intptr_t>(kernel_base - device_base));
    for (int i = 0; i < npus; ++i)
      devices.push_back(std::make_unique<Device>(i, device_base + i * chip.memory, chip.memory));
  }

  // ASCEND_EMULATOR_CHIP: fields of a chip in chips.py as name=value, separated by spaces.
  void describe() {
    const std::pair<const char*, Field> fields[] = {{"l2", &Chip::l2},
        {"cube_cores", &Chip::cube_cores}, {"vector_cores", &Chip::vector_cores},
        {"bfloat16", &Chip::bfloat16}, {"streams", &Chip::streams},
        {"graph_nodes", &Chip::graph_nodes}, {"bandwidth", &Chip::bandwidth},
        {"host_bandwidth", &Chip::host_bandwidth}, {"link_bandwidth", &Chip::link_bandwidth},
        {"injection_bandwidth", &Chip::injection_bandwidth},
        {"network_bandwidth", &Chip::network_bandwidth}, {"node", &Chip::node},
        {"collective", &Chip::collective}, {"cube_flops", &Chip::cube_flops},
        {"launch", &Chip::launch}};
    const char* given = std::getenv("ASCEND_EMULATOR_CHIP");
    std::stringstream words(given ? given : "");
    for (std::string word; words >> word;) {
      const auto equals = word.find('=');
      const double value = std::strtod(word.c_str() + equals + 1, nullptr);
      for (const auto& [name, field] : fields)
        if (word.compare(0, equals, name) == 0) set(field, value);
    }
  }

  using Field = std::variant<int64_t Chip::*, int Chip::*, bool Chip::*, double Chip::*>;
  void set(Field field, double value) {
    std::visit(
        [&](auto member) {
          using Type = std::decay_t<decltype(chip.*member)>;
          if constexpr (std::is_same_v<Type, bool>) chip.*member = value != 0;
          else chip.*member = static_cast<Type>(value);
        },
        field);
  }

  uintptr_t map(int protection) const {
    void* at = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
      fprintf(stderr,
          "ascend-emulator: cannot reserve %llu bytes of address space; use a smaller --memory\n",
          static_cast<unsigned long long>(bytes));
      std::abort();
    }
    return reinterpret_cast<uintptr_t>(at);
  }
};

Machine& machine() { return process.part<Machine>(); }

struct Settings {
  std::atomic<int> default_device{-1};
  // The visible devices, fixed when one was first set.
  std::atomic<const std::vector<int>*> in_use{nullptr};
  std::once_flag used;
  std::mutex peers_mutex;
  std::set<std::pair<int, int>> peers;
};
Settings& settings() { return process.part<Settings>(); }

void* kernel_view(uintptr_t address) {
  const auto& m = machine();
  return reinterpret_cast<void*>(address - m.device_base + m.kernel_base);
}

// A child process can use no NPU (status.h), so it gets no copy of their memory.
void on_first_use() {
  const auto& m = machine();
  madvise(reinterpret_cast<void*>(m.kernel_base), m.memory, MADV_DONTFORK);
  pthread_atfork(nullptr, nullptr, [] { process.fork(); });
}

thread_local int current = -1;

// ASCEND_EMULATOR_LEAKS: reported at exit, after torch_npu's clean-up: this library is unloaded
// after its dependents.
__attribute__((destructor)) void report_leaks() {
  if (process.forked() || !number("ASCEND_EMULATOR_LEAKS", 0)) return;
  for (const auto& npu : machine().devices)
    if (const auto line = npu->leaks(); !line.empty())
      fprintf(stderr, "ascend-emulator: %s\n", line.c_str());
}

}  // namespace

void* Device::allocate(uint64_t bytes) {
  bytes = std::max(std::max((bytes + kGranule - 1) / kGranule * kGranule, bytes),
      kGranule);  // rounding up may overflow
  host_access::watch();
  std::lock_guard lock(mutex_);
  count(bytes);
  for (auto block = free_.begin(); block != free_.end(); ++block) {
    if (block->second < bytes) continue;
    const auto [address, size] = *block;
    free_.erase(block);
    if (size > bytes) free_[address + bytes] = size - bytes;
    live_[address] = {bytes, ++memory_events().allocated, std::nullopt};
    poison(kernel_view(address), bytes, false);
    refused_ = 0;
    return reinterpret_cast<void*>(address);
  }
  used_ -= bytes;
  refuse(bytes, ", but not in one piece");
}

void Device::release(void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard lock(mutex_);
  const auto block = live_.find(address);
  check(block != live_.end(), kInvalidParam, "not an allocation of NPU ", id, ": ", pointer);
  const auto [bytes, _, shared] = block->second;
  live_.erase(block);
  ++memory_events().freed;
  used_ -= bytes;
  if (shared) {
    arena::unmap(kernel_view(address), bytes);
    arena::abandon(*shared);
  } else if (poisoned()) {
    poison(kernel_view(address), bytes, true);
  } else if (bytes >= kReturnPages) {
    madvise(kernel_view(address), bytes, MADV_DONTNEED);
  }
  auto at = free_.emplace(address, bytes).first;
  if (auto next = std::next(at); next != free_.end() && at->first + at->second == next->first) {
    at->second += next->second;
    free_.erase(next);
  }
  if (at != free_.begin()) {
    if (auto previous = std::prev(at); previous->first + previous->second == at->first) {
      previous->second += at->second;
      free_.erase(at);
    }
  }
}

void Device::reset() {
  std::vector<uintptr_t> addresses;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [address, _] : live_) addresses.push_back(address);
  }
  for (const auto address : addresses) release(reinterpret_cast<void*>(address));
}

void Device::reserve_physical(uint64_t bytes) {
  host_access::watch();
  std::lock_guard lock(mutex_);
  count(bytes);
  ++physical_[bytes];
}

void Device::release_physical(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  used_ -= bytes;
  if (--physical_[bytes] == 0) physical_.erase(bytes);
}

Device::Shared Device::share(const void* address) {
  std::lock_guard lock(mutex_);
  auto block = live_.upper_bound(reinterpret_cast<uintptr_t>(address));
  check(block != live_.begin() &&
            (--block)->first + block->second.bytes > reinterpret_cast<uintptr_t>(address),
      kInvalidParam, "not an allocation of NPU ", id, ": ", address);
  auto& [bytes, _, shared] = block->second;
  if (!shared) {
    void* view = kernel_view(block->first);
    const uint64_t offset = arena::allocate(bytes);
    arena::write(offset, view, bytes);
    arena::map(view, offset, bytes);
    shared = arena::publish(offset, bytes);
  }
  return {*shared, reinterpret_cast<uintptr_t>(address) - block->first};
}

void Device::inject_memory_error() {
  std::lock_guard lock(mutex_);
  const auto largest = std::max_element(live_.begin(), live_.end(),
      [](const auto& a, const auto& b) { return a.second.bytes < b.second.bytes; });
  if (largest != live_.end()) memory_error_ = reinterpret_cast<void*>(largest->first);
}
void Device::clear_memory_error() {
  std::lock_guard lock(mutex_);
  memory_error_ = nullptr;
}
void* Device::memory_error_address() {
  std::lock_guard lock(mutex_);
  return memory_error_;
}

uint64_t Device::available() {
  std::lock_guard lock(mutex_);
  return capacity_ - used_;
}

const Chip& chip() { return machine().chip; }
// The variable may change until a device is set (torch_npu's test_torch_npu.py,
// test_device_count_not_cached_pre_init), and afterwards for child processes.
std::vector<int> visible_devices() {
  const auto* fixed = settings().in_use.load();
  return fixed ? *fixed : visible();
}
int npu_count() { return static_cast<int>(number("ASCEND_EMULATOR_NPUS", 1)); }
int device_count() {
  const auto* fixed = settings().in_use.load();
  return static_cast<int>(fixed ? fixed->size() : visible().size());
}

Device& device(int id) {
  const int count = device_count();
  if (id < 0 || id >= count) {
    const char* shown = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
    std::string fix;
    if (id >= npu_count()) fix = text("; fix: ascend-emulator run --npus ", id + 1);
    else if (id >= 0 && shown) fix = text(": ASCEND_RT_VISIBLE_DEVICES is '", shown, "'");
    raise(kInvalidDevice, {"device ", id, " asked for, ", count, " present", fix});
  }
  return *machine().devices[id];
}

int physical_id(int id) {
  device(id);
  return visible_devices().at(id);
}

const std::string& machine_id() {
  static const std::string id = [] {
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    std::string text, bytes(16, '\0');
    std::getline(file, text);
    text.erase(std::remove(text.begin(), text.end(), '-'), text.end());
    for (size_t i = 0; i < bytes.size() && 2 * i + 1 < text.size(); ++i)
      bytes[i] = static_cast<char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
    return bytes;
  }();
  return id;
}

void enable_peer_access(int npu, int peer, bool enabled) {
  std::lock_guard lock(settings().peers_mutex);
  const auto pair = std::minmax(npu, peer);
  enabled ? void(settings().peers.insert(pair)) : void(settings().peers.erase(pair));
}
bool peer_access(int npu, int peer) {
  std::lock_guard lock(settings().peers_mutex);
  return npu == peer || settings().peers.count(std::minmax(npu, peer)) > 0;
}

bool has_current_device() { return current >= 0; }
int current_device() {
  if (const int npu = settings().default_device; current < 0 && npu >= 0) set_current_device(npu);
  check(current >= 0, kContextNull, "no device was set in this thread");
  check(machine().devices[current]->active, kContextNull, "NPU ", current,
      " was reset (aclrtResetDevice)");
  return current;
}
void set_default_device(int id) { settings().default_device = id; }
void set_current_device(int id) {
  auto& chosen = device(id);
  std::call_once(settings().used, on_first_use);
  chosen.active = true;
  if (!settings().in_use) {
    auto made = std::make_unique<const std::vector<int>>(visible());
    const std::vector<int>* none = nullptr;
    if (settings().in_use.compare_exchange_strong(none, made.get())) made.release();
  }
  current = chosen.id;
}

bool is_device(const void* address) {
  const auto& m = machine();
  const auto at = reinterpret_cast<uintptr_t>(address);
  return at >= m.device_base && at < m.device_base + m.bytes;
}

bool poisoned() {
  static const bool on = number("ASCEND_EMULATOR_POISON", 0) != 0;
  return on;
}

void poison(void* kernel_address, uint64_t bytes, bool freed) {
  if (!poisoned()) return;
  auto* words = static_cast<uint16_t*>(kernel_address);
  std::fill(words, words + bytes / sizeof *words, freed ? 0x7fff : 0xffff);
}

bool zero_pages(void* kernel_address, uint64_t bytes) {
  const auto& m = machine();
  const auto at = reinterpret_cast<uintptr_t>(kernel_address);
  if (at < m.kernel_base || at + bytes > m.kernel_base + m.bytes)
    return false;  // registered host memory, perhaps of a file
  // MADV_DONTNEED zeroes private memory only. Shared mappings of the arena (expandable segments,
  // IPC) need MADV_REMOVE, which fails at the first private one (madvise(2)).
  return madvise(kernel_address, bytes, MADV_REMOVE) == 0 ||
         madvise(kernel_address, bytes, MADV_DONTNEED) == 0;
}

bool is_virtual(const void* address) {
  const auto& m = machine();
  return is_device(address) && reinterpret_cast<uintptr_t>(address) >= m.device_base + m.memory;
}

const void* device_address(const void* kernel) {
  const auto& m = machine();
  const auto at = reinterpret_cast<uintptr_t>(kernel);
  const bool inside = at >= m.kernel_base && at < m.kernel_base + m.bytes;
  return inside ? reinterpret_cast<const void*>(at - m.kernel_base + m.device_base) : kernel;
}

LookedUp look_up(const void* address, uint64_t bytes) {
  const auto& m = machine();
  const auto at = reinterpret_cast<uintptr_t>(address);
  if (!is_device(address))
    return {{const_cast<void*>(address), kNoNpu}, host_memory::mapped(address)};
  LookedUp found{{kernel_view(at), kNoNpu}, 0};
  if (!is_virtual(address)) {
    found.place.npu = static_cast<int>((at - m.device_base) / m.chip.memory);
    found.bytes = m.devices[found.place.npu]->bytes_from(address, &found.allocation);
  } else {
    const auto mapped = virtual_memory::at(address, bytes);
    found.place.npu = mapped.npu;
    found.bytes = mapped.bytes;
    found.allocation = mapped.range;
    if (mapped.bytes && mapped.npu == kNoNpu) found.place.kernel = const_cast<void*>(address);
  }
  return found;
}

Allocation allocation_at(const void* address) {
  const auto& m = machine();
  if (is_virtual(address)) {
    const auto window = virtual_memory::window_at(address);
    return {window.first, window.second.bytes, window.second.npu};
  }
  const auto npu = (reinterpret_cast<uintptr_t>(address) - m.device_base) / m.chip.memory;
  const auto [start, bytes] = m.devices[npu]->block(address);
  return {start, bytes, static_cast<int>(npu)};
}

Place locate(const void* address, uint64_t bytes) {
  const auto found = look_up(address, bytes);
  check(is_device(address) || found.bytes >= bytes, kOpParam, "not device memory: ", address);
  check(bytes <= found.bytes, kInvalidParam, bytes, " bytes at ", address, ", where ", found.bytes,
      " are allocated");
  return found.place;
}

void* resolve(const void* address, bool must_be_device, const char* what, uint64_t bytes) {
  if (must_be_device) return to_kernel(address, bytes);
  check(!is_device(address) || locate(address, bytes).npu == kNoNpu, kInvalidParam, what,
      " is device memory where host memory is expected: ", address);
  return const_cast<void*>(address);
}

bool is_pinned(const void* address) {
  if (!is_device(address)) return host_memory::pinned(address) != 0;
  const auto mapped = virtual_memory::at(address, 1);  // host physical memory
  return mapped.bytes && mapped.npu == kNoNpu;
}

}  // namespace emu
