// Faults on demand: ASCEND_EMULATOR_FAULTS="aclrtMalloc@3=oom;aclnnMatmul@10=ecc;stream@100=hang;HcclAllReduce@2+=timeout", or
// ascend_emulator_inject() with the same text. `NAME@N=KIND` happens at the Nth call of an entry point, `NAME@N+=KIND` at every
// call from then on; calls are counted in each process, from when the fault was asked for.
#ifndef ASCEND_EMULATOR_CORE_FAULT_H
#define ASCEND_EMULATOR_CORE_FAULT_H
#include <atomic>

#include "status.h"

namespace emu::fault {

extern std::atomic<bool> any;
inline bool armed() { return any.load(std::memory_order_relaxed); }

// An entry point is called: throws if that is the fault.
void at(const char* name);

// What the call that runs on this thread has to do itself, once: an operator or collective to hang on its stream, a collective to
// time out or to lose its link. Ask only if armed().
enum class Kind { none, oom, ecc, uce, error, hang, timeout, drop };
Kind pending();

// A task is put on a stream: whether it has to hang, and what it does then, until its stream is aborted.
bool hangs();
void hang();

}  // namespace emu::fault

#endif  // ASCEND_EMULATOR_CORE_FAULT_H
