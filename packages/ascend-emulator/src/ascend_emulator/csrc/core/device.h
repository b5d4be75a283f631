// The emulated NPUs of this process: how many, which chip, and their memory.
//
// A device address is one that the host may hold but not touch: it lies in a PROT_NONE reservation. Kernels reach the bytes at
// a second mapping, a constant distance away, that only to_kernel() knows. A host read of a device pointer so faults as
// it does on hardware.
#ifndef ASCEND_EMULATOR_CORE_DEVICE_H
#define ASCEND_EMULATOR_CORE_DEVICE_H
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "status.h"

namespace emu {

struct Chip {
  std::string name = "Ascend910B1";
  uint64_t memory = 0;  // bytes
  int64_t l2 = 0;       // bytes
  int cube_cores = 0;
  int vector_cores = 0;
  bool bfloat16 = true;  // whether operators take it
  int streams = 1984;
  int graph_nodes = 1 << 20;
  // For the roofline model (observe.h): per second, seconds.
  double bandwidth = 1.6e12, host_bandwidth = 32e9, link_bandwidth = 28e9, cube_flops = 300e12, vector_flops = 10e12, launch = 5e-6, graph_launch = 1e-6;
};

class Device {
 public:
  Device(int id, uintptr_t base, uint64_t capacity) : id(id), base_(base), capacity_(capacity) { free_[base] = capacity; }

  void* allocate(uint64_t bytes);
  void release(void* address);
  uint64_t capacity() const { return capacity_; }
  uint64_t available();
  uint64_t left(const void* address);  // bytes from here to the end of the allocation, 0 outside one
  bool owns(const void* address) const {
    const auto at = reinterpret_cast<uintptr_t>(address);
    return at >= base_ && at < base_ + capacity_;
  }

  const int id;  // logical, after ASCEND_RT_VISIBLE_DEVICES
  std::atomic<bool> active{false};  // some thread has set it

 private:
  std::mutex mutex_;
  uintptr_t base_;
  uint64_t capacity_;
  uint64_t used_ = 0;
  std::map<uintptr_t, uint64_t> free_;  // address -> bytes, coalesced
  std::map<uintptr_t, uint64_t> live_;
};

const Chip& chip();
int device_count();
Device& device(int id);  // throws kInvalidParam

// The calling thread's device, or the default one if aclInit was given that; throws kContextNull when there is neither.
int current_device();
void set_default_device(int id);
bool has_current_device();
void set_current_device(int id);

bool is_device(const void* address);
void* to_kernel(const void* device_address);           // throws if it is not device memory
bool is_pinned(const void* host_address);              // whether aclrtMallocHost gave it
void* either(const void* address, bool must_be_device, const char* what);  // kernel view, or the host pointer itself

}  // namespace emu

#endif  // ASCEND_EMULATOR_CORE_DEVICE_H
