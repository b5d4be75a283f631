// Operators that wait for other ranks: their tasks may block, as collectives do (Task::blocks in stream.h).
#ifndef ASCEND_EMULATOR_OPERATOR_COMMUNICATES_H
#define ASCEND_EMULATOR_OPERATOR_COMMUNICATES_H

namespace emu {

// Whether this operator does; `from_now_on` enters it.
bool communicates(const char* name, bool from_now_on);

}  // namespace emu

#endif  // ASCEND_EMULATOR_OPERATOR_COMMUNICATES_H
