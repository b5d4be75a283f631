// Memory of this process that others can map: one memory file, of which every physical allocation and every shared one takes a
// part that is used once. The file is sparse and grows; the pages of a part that is given back are freed.
#ifndef ASCEND_EMULATOR_CORE_ARENA_H
#define ASCEND_EMULATOR_CORE_ARENA_H
#include <cstdint>
#include <string>
#include <vector>

namespace emu::arena {

uint64_t take(uint64_t bytes);  // the offset in the file
void give(uint64_t offset, uint64_t bytes);
void write(uint64_t offset, const void* from, uint64_t bytes);

// Maps a part, of this process's file or of another's, in place of what is there.
void map(void* at, uint64_t offset, uint64_t bytes);
void map(void* at, int file, uint64_t offset, uint64_t bytes);
// Makes the address range private, empty memory again.
void unmap(void* at, uint64_t bytes);

// Gives a part a number that other processes can ask for it by: `pid << 32 | index`. They may once it is offered.
uint64_t publish(uint64_t offset, uint64_t bytes);
void offer(uint64_t key, bool to_everybody);
void allow(uint64_t key, const int32_t* processes, size_t count);
void withdraw(uint64_t key);  // nobody may take it from now on
// Gives the part back when the last process that took it lets go; at once if none has.
void abandon(uint64_t key);

// Another process's part, or this one's.
struct Import {
  int file;
  uint64_t offset, bytes, key;
};
Import open(uint64_t key);
void let_go(const Import& import);

}  // namespace emu::arena

#endif  // ASCEND_EMULATOR_CORE_ARENA_H
