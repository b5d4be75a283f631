// Observation: a trace of what the device does (ASCEND_EMULATOR_TRACE=FILE), and the time that it would take by the roofline
// model.
//
// The model: an operator takes the longest of its floating-point operations over the throughput of its cores, its bytes over the
// memory's bandwidth and its bytes over the link's, and a launch besides. Streams go on side by side; an event carries the time
// of its record to whoever waits for it. The host is taken to be quick enough. The figures of a chip, with their sources, are in
// chips.toml. It is an estimate.
#ifndef ASCEND_EMULATOR_CORE_TRACE_H
#define ASCEND_EMULATOR_CORE_TRACE_H
#include "cost.h"
#include "stream.h"

namespace emu {

bool observing();  // whether Task::work is to be filled in

// Of a task, from before it runs until after.
class Observation {
 public:
  Observation(Stream& stream, const Task& task);
  ~Observation();

 private:
  const bool on_;
  Stream& stream_;
  const Task& task_;
  cost::Sheet sheet_;
  cost::Open open_;
  Clock::time_point start_;
};

// Of a call that makes the host wait, or copies before it returns.
class HostObservation {
 public:
  explicit HostObservation(const char* name, double copied = 0);
  ~HostObservation();

 private:
  const char* name_;
  double copied_;
  Clock::time_point start_;
  bool on_;
};

double modelled_seconds(Kind kind, const Work& work, bool in_graph);
void flush_trace();

}  // namespace emu

#endif  // ASCEND_EMULATOR_CORE_TRACE_H
