// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// The emulated NPUs of this process: how many, which chip, and their memory.
//
// Device addresses lie in a PROT_NONE reservation, so a host access through a device pointer
// faults, as on hardware. Kernels access the memory through a second mapping at a constant distance
// (to_kernel()). The reservation holds each NPU's memory, where aclrtMalloc allocates, followed by
// address space for virtual memory (virtual_memory.h).
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memory_events.h"
#include "status.h"

namespace emu {

struct Chip {
  std::string name = "Ascend910B1";
  uint64_t memory = 0;  // bytes
  int64_t l2 = 0;       // bytes
  int cube_cores = 0;
  int vector_cores = 0;
  bool bfloat16 = true;  // whether operators support it
  int streams = 1984;
  int driver = 0;  // version of the driver, 25.5.1 as 250501; 0 where it is unknown
  int graph_nodes = 1 << 20;
  // For modelled times (laws.h): NPUs that links join, bytes/s, FLOP/s, and seconds.
  int node = 8;
  double bandwidth = 1.6e12, host_bandwidth = 32e9, link_bandwidth = 28e9, injection_bandwidth = 0,
         network_bandwidth = 25e9, collective = 20e-6, cube_flops = 300e12, launch = 5e-6;
};

class Device {
 public:
  Device(int id, uintptr_t base, uint64_t capacity) : id(id), base_(base), capacity_(capacity) {
    free_[base] = capacity;
  }

  void* allocate(uint64_t bytes);
  void release(void* address);
  // Physical memory without an address, counted against the same capacity. reserve_physical()
  // throws kOutOfMemory.
  void reserve_physical(uint64_t bytes);
  void release_physical(uint64_t bytes);
  uint64_t capacity() const { return capacity_; }
  uint64_t available();
  struct Usage {
    uint64_t now, most;
  };
  Usage usage();
  // The allocation that holds the address: its start and bytes, 0 outside of allocations.
  std::pair<uintptr_t, uint64_t> block(const void* address);
  // To the end of the address's allocation, 0 outside of allocations; and the number of the
  // allocation.
  uint64_t bytes_from(const void* address, uint64_t* allocation = nullptr);
  bool owns(const void* address) const {
    const auto at = reinterpret_cast<uintptr_t>(address);
    return at >= base_ && at < base_ + capacity_;
  }
  // Moves the allocation that holds this address into the arena (arena.h), where other processes
  // can map it; the address stays. No kernel may be running.
  struct Shared {
    uint64_t key;    // as published
    uint64_t delta;  // of the address within the allocation
  };
  Shared share(const void* address);

  // Injected memory error at the start of the largest allocation.
  void inject_memory_error();
  void clear_memory_error();
  void* memory_error_address();

  void reset();  // releases all allocations

  // One line about allocations that were never released; empty if there are none.
  std::string leaks();

  const int id;                     // logical, after ASCEND_RT_VISIBLE_DEVICES
  std::atomic<bool> active{false};  // set as current device by some thread

 private:
  struct Block {
    uint64_t bytes;
    uint64_t allocation;             // its number
    std::optional<uint64_t> shared;  // its key in the arena
  };
  void count(uint64_t bytes);
  [[noreturn]] void refuse(uint64_t bytes, const char* why = "");  // memory is exhausted

  std::mutex mutex_;
  uintptr_t base_;
  uint64_t capacity_;
  uint64_t used_ = 0, most_ = 0;
  uint64_t refused_ = 0;  // bytes of the latest allocation that was refused
  bool told_ = false;     // of exhausted memory
  void* memory_error_ = nullptr;
  std::map<uintptr_t, uint64_t> free_;  // address -> bytes, coalesced
  std::map<uintptr_t, Block> live_;
  std::map<uint64_t, uint64_t> physical_;  // bytes -> number of reservations
};

const Chip& chip();
// Whether the chip belongs to this family, named as in torch_npu's documentation: "Ascend910B"
// (A2), "Ascend910_93" (A3), "Ascend950" (A5), "Ascend310P".
inline bool is_chip(const char* family) { return chip().name.rfind(family, 0) == 0; }
int npu_count();  // visible or not
int device_count();
Device& device(int id);  // throws kInvalidDevice
// Number of an NPU on its machine, from its number in this process (ASCEND_RT_VISIBLE_DEVICES).
int physical_id(int id);
// Identifier of this machine: 16 bytes, from its boot id.
const std::string& machine_id();

// Whether copies between two NPUs are enabled; aclrtDeviceEnablePeerAccess enables them in both
// directions.
void enable_peer_access(int npu, int peer, bool enabled);
bool peer_access(int npu, int peer);

// The calling thread's device, or aclInit's default device; throws kContextNull without either, and
// if the device was reset.
int current_device();
void set_default_device(int id);
bool has_current_device();
void set_current_device(int id);

// ASCEND_EMULATOR_POISON: fills memory with NaNs when it is allocated (all bits set) and freed
// (0x7FFF).
bool poisoned();
void poison(void* kernel_address, uint64_t bytes, bool freed);
// Zeroes whole pages of device memory by returning them to the system. False if this is other
// memory: nothing has changed then.
bool zero_pages(void* kernel_address, uint64_t bytes);

bool is_device(const void* address);
// Kernel address and NPU of a device address. Throws unless all bytes are allocated, mapped, or
// registered host memory.
struct Place {
  void* kernel;
  int npu;
};
Place locate(const void* address, uint64_t bytes);
// The same without an error.
struct LookedUp {
  Place place;
  uint64_t bytes;  // from the address to the end of its allocation or mapping, at least those asked
                   // for; 0 if there is none
  uint64_t allocation = 0;  // number of the allocation or address range
};
LookedUp look_up(const void* address, uint64_t bytes);
// The allocation, or the mapping, that holds a device address: `bytes` is 0 outside.
struct Allocation {
  uintptr_t start;
  uint64_t bytes;
  int npu;
};
Allocation allocation_at(const void* address);
bool is_virtual(const void* address);  // in an address range of virtual memory
// Device address of a kernel address; other addresses are returned unchanged.
const void* device_address(const void* kernel);

inline void* to_kernel(const void* device_address, uint64_t bytes = 1) {
  return locate(device_address, bytes).kernel;
}
// Kernel address of device memory, or the host pointer itself.
void* resolve(const void* address, bool must_be_device, const char* what, uint64_t bytes = 1);

// Whether the address is page-locked: of aclrtMallocHost or aclrtHostRegister.
bool is_pinned(const void* address);

}  // namespace emu
