// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Kernels of Triton, compiled for this processor by ascend_emulator/triton: a launch is a task of
// its stream, which runs the programs of the grid one after the other. A compiled kernel calls the
// functions ascend_emulator_triton_…: before each access outside of its local memory, to copy, and
// for local memory (the unified buffer of an NPU).
#include <algorithm>
#include <csetjmp>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "core/adversary.h"
#include "core/device.h"
#include "core/process.h"
#include "core/recheck.h"
#include "core/refusal.h"
#include "core/registry.h"
#include "core/rules.h"
#include "core/stream.h"

using namespace emu;

extern "C" {
// An argument that is a pointer: the memory that the kernel may access through any of its pointers.
// `bytes` is 0 for a bare address, which stands for its allocation.
struct AscendEmulatorTritonPointer {
  const char *name, *dtype;  // dtype: Triton's name, such as bf16
  const void* storage;
  uint64_t bytes;
  int32_t slot;  // of the address, which the next slot repeats
};
}

namespace {
constexpr int64_t kMostPrograms = 65535;
constexpr int kGridSlots = 6;  // at the end: the grid's size, and the program's place in it

struct Extent {
  std::string name;
  const void* address;  // of the NPU
  const char* first;    // as the kernel sees it
  uint64_t bytes;
};

struct Local {
  char* first;
  uint64_t bytes;
};

// Names outlive their launch: traces refer to them.
struct Names {
  std::mutex mutex;
  std::set<std::string> all;
};
const char* lasting(const char* name) {
  auto& names = process.part<Names>();
  std::lock_guard lock(names.mutex);
  return names.all.insert(name).first->c_str();
}

struct Launch {
  const char* name;
  void (*entry)(uint64_t*);
  std::vector<uint64_t> slots;
  std::vector<Extent> extents;
  Recheck memory;

  void run();
};

// The program that a stream's thread runs.
struct Program {
  std::vector<Extent> extents;
  std::vector<Local> locals{};
  const char* frame;  // the stack of the kernel is below it
  std::string failure{};
  std::jmp_buf back{};
  int32_t place[3]{};
};
thread_local Program* program = nullptr;

bool spans(const char* first, uint64_t bytes, const char* at, uint64_t size) {
  return at >= first && at - first <= static_cast<int64_t>(bytes) - static_cast<int64_t>(size);
}

// What lies at the address, or which tensor is nearest to it.
std::string surroundings(const char* at) {
  const Extent* nearest = nullptr;
  uint64_t distance = std::numeric_limits<uint64_t>::max();
  for (const auto& each : program->extents) {
    const auto* const end = each.first + each.bytes;
    const uint64_t away = at < each.first ? each.first - at : at >= end ? at - end : 0;
    if (away >= distance) continue;
    nearest = &each;
    distance = away;
  }
  if (!nearest) return "the kernel has no tensor";
  const auto end = nearest->first + nearest->bytes;
  const auto where = at < nearest->first ? text(nearest->first - at, " bytes before ")
                     : at >= end         ? text(at - end, " bytes after the end of ")
                                         : std::string("across the end of ");
  return text(where, nearest->name, ", ", nearest->bytes, " bytes at ", nearest->address);
}

[[gnu::noinline]] void note_failure(
    const char* at, uint64_t bytes, int32_t line, const char* does, bool& allowed) {
  const auto* const address = device_address(at);
  const auto* const place = program->place;
  try {
    rule("triton.bounds", [&] {
      throw Error(kOpParam,
          text(does, " ", bytes, " bytes at ", address,
              line ? text(", line ", line) : std::string(), ", in program (", place[0], ", ",
              place[1], ", ", place[2], "), outside of its tensors: ", surroundings(at),
              "; fix: a mask, or the tensor's size"));
    });
    // Allowed: what the NPU has allocated.
    allowed = is_device(address) && look_up(address, bytes).bytes >= bytes;
    if (!allowed)
      program->failure = text(does, " ", bytes, " bytes at ", address,
          ", where the NPU has no memory: ", surroundings(at));
  } catch (const Error& error) { program->failure = error.what(); }
}

void check_access(const char* at, uint64_t bytes, int32_t line, const char* does) {
  for (const auto& each : program->extents)
    if (spans(each.first, each.bytes, at, bytes)) return;
  for (const auto& each : program->locals)
    if (spans(each.first, each.bytes, at, bytes)) return;
  const char here = 0;
  if (at > &here && at < program->frame) return;
  bool allowed = false;
  note_failure(at, bytes, line, does, allowed);
  // The kernel has no frames to unwind, and its local memory is in a list.
  if (!allowed) std::longjmp(program->back, 1);
}

void release_locals(Program& of) {
  for (const auto& each : of.locals) std::free(each.first);
  of.locals.clear();
}

void Launch::run() {
  if (null_mode()) return;
  memory.verify([&] {
    for (const auto& each : extents) memory.check(each.name.c_str(), each.address, each.bytes);
  });
  const auto* const grid = &slots[slots.size() - kGridSlots];
  std::vector<uint32_t> order(grid[0] * grid[1] * grid[2]);
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  if (Adversary::on()) {
    const auto seed = running_stream().completed();
    for (size_t i = order.size(); i > 1; --i)
      std::swap(order[i - 1], order[Adversary::number({seed, i}) % i]);
  }
  const char here = 0;
  Program running{.extents = extents, .frame = &here};
  program = &running;
  auto own = slots;
  auto* const place = &own[own.size() - kGridSlots / 2];
  for (const auto each : order) {
    place[0] = each % grid[0];
    place[1] = each / grid[0] % grid[1];
    place[2] = each / grid[0] / grid[1];
    std::copy_n(place, 3, running.place);
    if (setjmp(running.back) == 0) entry(own.data());
    release_locals(running);
    if (!running.failure.empty()) break;
  }
  program = nullptr;
  if (!running.failure.empty())
    throw Error(kOpParam, running.failure, running.failure.find("(rule ") != std::string::npos);
}

// The bytes that an access of `rank` dimensions with these sizes and strides spans.
struct View {
  char* first;
  const int64_t *sizes, *strides;
};
View view(int64_t rank, const void* descriptor, int64_t size) {
  const auto* const fields = static_cast<const int64_t*>(descriptor);
  return {reinterpret_cast<char*>(fields[1]) + fields[2] * size, fields + 3, fields + 3 + rank};
}
void check_view(const View& of, int64_t rank, int64_t size, int32_t line, const char* does) {
  int64_t low = 0, high = 0;
  for (int64_t i = 0; i < rank; ++i)
    (of.strides[i] < 0 ? low : high) += (of.sizes[i] - 1) * of.strides[i] * size;
  check_access(of.first + low, high - low + size, line, does);
}

}  // namespace

// Takes the arguments' slots: five for a pointer, as for a memref of one dimension, one for a
// number.
EXPORT int ascend_emulator_triton_launch(const char* name, void (*entry)(uint64_t*),
    const uint64_t* slots, int count, const AscendEmulatorTritonPointer* pointers, int number,
    int unbounded, void* stream) {
  const auto* const named = lasting(name);
  return guarded(named, [&] {
    const auto launch = std::make_shared<Launch>();
    launch->name = named;
    launch->entry = entry;
    launch->slots.assign(slots, slots + count);
    const auto* const grid = slots + count - kGridSlots;
    rule("triton.grid", unbounded || grid[0] * grid[1] * grid[2] <= kMostPrograms, "a grid of ",
        grid[0], " x ", grid[1], " x ", grid[2], " programs; supported: at most ", kMostPrograms,
        " in all, more with TRITON_ALL_BLOCKS_PARALLEL=1");
    for (int i = 0; i < number; ++i) {
      const auto& [given, dtype, storage, size, slot] = pointers[i];
      const std::string_view type = dtype;
      rule("triton.dtype",
          (type != "bf16" || chip().bfloat16) &&
              (type.substr(0, 3) != "fp8" || is_chip("Ascend950")),
          given, " has the dtype ", dtype, ", which ", chip().name, " does not compute");
      rule("triton.memory", is_device(storage), given, " is at ", storage,
          ", which is no memory of an NPU");
      const auto allocation =
          size ? Allocation{reinterpret_cast<uintptr_t>(storage), size, 0} : allocation_at(storage);
      const auto* const start = reinterpret_cast<const void*>(allocation.start);
      auto* const first = static_cast<char*>(to_kernel(start, allocation.bytes));
      launch->extents.push_back({given, start, first, allocation.bytes});
      for (const int each : {slot, slot + 1})
        launch->slots[each] += reinterpret_cast<uintptr_t>(first) - allocation.start;
    }
    if (grid[0] * grid[1] * grid[2] == 0) return;
    stream_of(stream).submit({named, [launch] { launch->run(); }});
    note(named);
  });
}

// Called by compiled kernels.
EXPORT void ascend_emulator_triton_check(
    const char* at, int64_t bytes, int32_t line, int32_t writes) {
  if (bytes > 0) check_access(at, bytes, line, writes ? "writes" : "reads");
}

// Ranked descriptors: a rank, and a pointer to base, aligned base, offset, sizes and strides.
struct Ranked {
  int64_t rank;
  const void* descriptor;
};
EXPORT void ascend_emulator_triton_copy(
    int64_t size, const Ranked* from, const Ranked* to, int32_t line) {
  const auto rank = from->rank;
  const auto source = view(rank, from->descriptor, size), target = view(rank, to->descriptor, size);
  if (std::any_of(source.sizes, source.sizes + rank, [](int64_t each) { return each <= 0; }))
    return;
  check_view(source, rank, size, line, "reads");
  check_view(target, rank, size, line, "writes");
  // The last dimension at once, where it is contiguous.
  const bool dense = rank && source.strides[rank - 1] == 1 && target.strides[rank - 1] == 1;
  const int64_t outer = dense ? rank - 1 : rank,
                bytes = dense ? source.sizes[rank - 1] * size : size;
  std::vector<int64_t> at(outer);
  for (;;) {
    int64_t read = 0, write = 0;
    for (int64_t i = 0; i < outer; ++i)
      read += at[i] * source.strides[i], write += at[i] * target.strides[i];
    std::memmove(target.first + write * size, source.first + read * size, bytes);
    int64_t next = outer - 1;
    for (; next >= 0 && ++at[next] == source.sizes[next]; --next) at[next] = 0;
    if (next < 0) return;
  }
}

EXPORT void* ascend_emulator_triton_allocate(int64_t bytes) {
  auto* const first = static_cast<char*>(std::malloc(bytes));
  if (!first) {
    program->failure = text("no memory for ", bytes, " bytes of local memory");
    std::longjmp(program->back, 1);
  }
  if (poisoned()) std::memset(first, 0xff, bytes);
  program->locals.push_back({first, static_cast<uint64_t>(bytes)});
  return first;
}

EXPORT void ascend_emulator_triton_release(char* first) {
  auto& locals = program->locals;
  const auto at = std::find_if(
      locals.rbegin(), locals.rend(), [&](const Local& each) { return each.first == first; });
  if (at == locals.rend()) return;
  locals.erase(std::next(at).base());
  std::free(first);
}

// An address that the kernel read from memory: it may access the allocation.
EXPORT void* ascend_emulator_triton_pointer(int64_t number) {
  const auto* const address = reinterpret_cast<const void*>(number);
  const auto found = is_device(address) ? allocation_at(address) : Allocation{};
  if (!found.bytes) {
    program->failure = text("follows the address ", address, ", where the NPU has no memory");
    std::longjmp(program->back, 1);
  }
  const auto* const start = reinterpret_cast<const void*>(found.start);
  auto* const first = static_cast<char*>(to_kernel(start, found.bytes));
  program->extents.push_back({"an address in memory", start, first, found.bytes});
  return first + (number - found.start);
}
