// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Memory that other processes can map: one sparse memory file (memfd). Every physical allocation
// and every shared allocation gets a range of its own; releasing it frees its pages, and the range
// is used again.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace emu::arena {

uint64_t allocate(uint64_t bytes);  // returns the offset in the file
void release(uint64_t offset, uint64_t bytes);
void write(uint64_t offset, const void* from, uint64_t bytes);

// Maps a range of this process's file, or of another's, over the existing mapping.
void map(void* at, uint64_t offset, uint64_t bytes);
void map(void* at, int file, uint64_t offset, uint64_t bytes);
// Replaces the mapping by private anonymous memory.
void unmap(void* at, uint64_t bytes);

// Returns the key under which other processes can open a range. They may open it after offer(). A
// key of a process that ended opens nothing, also when another process has its number.
uint64_t publish(uint64_t offset, uint64_t bytes);
int owner(uint64_t key);  // the process
void offer(uint64_t key, bool to_everybody);
void allow(uint64_t key, const int32_t* processes, size_t count);
void withdraw(uint64_t key);  // cannot be opened from now on
// Releases the range; if other processes have it open, when the last of them has closed it or
// ended.
void abandon(uint64_t key);

// Range of this or another process.
struct Import {
  int file, parts;  // `parts` has the lock of the range
  uint64_t offset, bytes, key;
};
Import open(uint64_t key);
void close_import(const Import& import);

}  // namespace emu::arena
