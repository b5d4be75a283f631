#include "device.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>

namespace emu {
namespace {

constexpr uint64_t kGranule = 512;           // alignment of aclrtMalloc, as torch_npu's allocator assumes
constexpr uint64_t kReturnPages = 1u << 20;  // freed blocks of at least this size give their pages back

uint64_t number(const char* variable, uint64_t otherwise) {
  const char* value = std::getenv(variable);
  return value && *value ? std::strtoull(value, nullptr, 10) : otherwise;
}

struct Machine {
  Chip chip;
  std::vector<std::unique_ptr<Device>> devices;
  uintptr_t device_base = 0, kernel_base = 0, bytes = 0;

  Machine() {
    if (const char* name = std::getenv("ASCEND_EMULATOR_SOC")) chip.name = name;
    chip.memory = number("ASCEND_EMULATOR_MEMORY", 4ull << 30) & ~((1ull << 21) - 1);
    describe();
    const int visible = count_visible(static_cast<int>(number("ASCEND_EMULATOR_NPUS", 1)));
    if (visible == 0) return;
    bytes = chip.memory * visible;
    device_base = map(PROT_NONE);
    kernel_base = map(PROT_READ | PROT_WRITE);
    madvise(reinterpret_cast<void*>(kernel_base), bytes, MADV_HUGEPAGE);
    for (int i = 0; i < visible; ++i) devices.push_back(std::make_unique<Device>(i, device_base + i * chip.memory, chip.memory));
  }

  // ASCEND_EMULATOR_CHIP: the fields of a chip in chips.py, as name=value with spaces between.
  void describe() {
    std::stringstream fields(std::getenv("ASCEND_EMULATOR_CHIP") ? std::getenv("ASCEND_EMULATOR_CHIP") : "");
    for (std::string field; fields >> field;) {
      const auto equals = field.find('=');
      const auto name = field.substr(0, equals);
      const double value = std::strtod(field.c_str() + equals + 1, nullptr);
      if (name == "l2") chip.l2 = static_cast<int64_t>(value);
      else if (name == "cube_cores") chip.cube_cores = static_cast<int>(value);
      else if (name == "vector_cores") chip.vector_cores = static_cast<int>(value);
      else if (name == "bfloat16") chip.bfloat16 = value != 0;
      else if (name == "streams") chip.streams = static_cast<int>(value);
      else if (name == "graph_nodes") chip.graph_nodes = static_cast<int>(value);
      else if (name == "bandwidth") chip.bandwidth = value;
      else if (name == "host_bandwidth") chip.host_bandwidth = value;
      else if (name == "link_bandwidth") chip.link_bandwidth = value;
      else if (name == "cube_flops") chip.cube_flops = value;
      else if (name == "vector_flops") chip.vector_flops = value;
      else if (name == "launch") chip.launch = value;
      else if (name == "graph_launch") chip.graph_launch = value;
    }
  }

  uintptr_t map(int protection) const {
    void* at = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
      fprintf(stderr, "ascend-emulator: cannot reserve %llu bytes of address space; use a smaller --memory\n",
              static_cast<unsigned long long>(bytes));
      std::abort();
    }
    return reinterpret_cast<uintptr_t>(at);
  }

  // ASCEND_RT_VISIBLE_DEVICES, as CANN documents it: a list of ids; the first invalid one ends the list.
  static int count_visible(int npus) {
    const char* list = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
    if (!list) return npus;
    int count = 0;
    std::stringstream items(list);
    for (std::string item; std::getline(items, item, ',');) {
      char* end = nullptr;
      const long id = std::strtol(item.c_str(), &end, 10);
      if (end == item.c_str() || id < 0 || id >= npus) break;
      ++count;
    }
    return count;
  }
};

Machine& machine() {
  static Machine* instance = new Machine();  // never destroyed: torch_npu frees memory during exit
  return *instance;
}

thread_local int current = -1;
std::atomic<int> default_device{-1};

}  // namespace

void* Device::allocate(uint64_t bytes) {
  bytes = std::max<uint64_t>((bytes + kGranule - 1) / kGranule * kGranule, kGranule);
  std::lock_guard lock(mutex_);
  for (auto block = free_.begin(); block != free_.end(); ++block) {
    if (block->second < bytes) continue;
    const auto [address, size] = *block;
    free_.erase(block);
    if (size > bytes) free_[address + bytes] = size - bytes;
    live_[address] = bytes;
    used_ += bytes;
    return reinterpret_cast<void*>(address);
  }
  throw Error(kOutOfMemory, text("out of memory on NPU ", id, ": asked for ", bytes, " bytes, ", capacity_ - used_, " of ",
                                 capacity_, " free"));
}

void Device::release(void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard lock(mutex_);
  const auto block = live_.find(address);
  check(block != live_.end(), kInvalidParam, "not an allocation of NPU ", id, ": ", pointer);
  const uint64_t bytes = block->second;
  live_.erase(block);
  used_ -= bytes;
  if (bytes >= kReturnPages) {
    const auto first = (address + 4095) & ~uintptr_t{4095}, last = (address + bytes) & ~uintptr_t{4095};
    madvise(to_kernel(reinterpret_cast<void*>(first)), last - first, MADV_DONTNEED);
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

uint64_t Device::left(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  std::lock_guard lock(mutex_);
  auto block = live_.upper_bound(at);
  if (block == live_.begin()) return 0;
  --block;
  return block->first + block->second > at ? block->first + block->second - at : 0;
}

uint64_t Device::available() {
  std::lock_guard lock(mutex_);
  return capacity_ - used_;
}

const Chip& chip() { return machine().chip; }
int device_count() { return static_cast<int>(machine().devices.size()); }

Device& device(int id) {
  auto& all = machine().devices;
  check(id >= 0 && id < static_cast<int>(all.size()), kInvalidParam, "device ", id, " asked for, ", all.size(), " present");
  return *all[id];
}

bool has_current_device() { return current >= 0; }
int current_device() {
  if (current < 0 && default_device >= 0) set_current_device(default_device);
  check(current >= 0, kContextNull, "no device was set in this thread");
  return current;
}
void set_default_device(int id) { default_device = id; }
void set_current_device(int id) {
  auto& chosen = device(id);
  chosen.active = true;
  current = chosen.id;
}

bool is_device(const void* address) {
  const auto& m = machine();
  const auto at = reinterpret_cast<uintptr_t>(address);
  return at >= m.device_base && at < m.device_base + m.bytes;
}

void* to_kernel(const void* address) {
  check(is_device(address), kOpParam, "not device memory: ", address);
  const auto& m = machine();
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) - m.device_base + m.kernel_base);
}

void* either(const void* address, bool must_be_device, const char* what) {
  if (must_be_device) return to_kernel(address);
  check(!is_device(address), kInvalidParam, what, " is device memory where host memory is expected: ", address);
  return const_cast<void*>(address);
}

}  // namespace emu
