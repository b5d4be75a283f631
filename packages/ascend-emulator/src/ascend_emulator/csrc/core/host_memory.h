// Host memory that the runtime knows of: page-locked, or registered for devices to use.
#ifndef ASCEND_EMULATOR_CORE_HOST_MEMORY_H
#define ASCEND_EMULATOR_CORE_HOST_MEMORY_H
#include <cstdint>

namespace emu::host_memory {

void* allocate(uint64_t bytes);  // page-locked, as aclrtMallocHost's
void release(void* address);

void register_range(void* address, uint64_t bytes, bool for_devices);
void unregister(void* address);

// Bytes from the address on to the end of what is page-locked there, or usable by devices; 0 if none.
uint64_t pinned(const void* address);
uint64_t mapped(const void* address);

}  // namespace emu::host_memory

#endif  // ASCEND_EMULATOR_CORE_HOST_MEMORY_H
