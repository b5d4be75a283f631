// Operators that communicate with other ranks: their tasks may block, as collectives do (Task::blocks in core/stream.h).
#ifndef ASCEND_EMULATOR_OPERATOR_COMMUNICATES_H
#define ASCEND_EMULATOR_OPERATOR_COMMUNICATES_H

namespace emu {

// Whether this operator does; `register_it` adds it to the set.
bool communicates(const char* name, bool register_it);

}  // namespace emu

#endif  // ASCEND_EMULATOR_OPERATOR_COMMUNICATES_H
