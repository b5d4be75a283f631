// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Trace of the device's tasks (ASCEND_EMULATOR_TRACE=FILE, and the file of a running profile), and
// the modelled clock.
//
// A task takes what its law says (laws.h), after the task before it on its stream, and not before
// the host launches it. Streams run in parallel; an event passes the time of its record to the
// streams that wait for it; a collective begins with the last of its ranks. The host takes a fixed
// time for each launch, and what it waits for; this machine's time is never added. With
// ASCEND_EMULATOR_TIME=modelled, events, traces and profiles show this clock instead of the
// machine's.
#pragma once
#include "cost.h"
#include "task.h"

namespace emu {

bool trace_enabled();             // whether Task::work is to be filled in
bool shows_modelled_time();       // ASCEND_EMULATOR_TIME=modelled
double host_launches(Kind kind);  // while trace_enabled(): the host launches a task
// The host learns that the device has come this far; nothing unless trace_enabled().
void host_reaches(double seconds);
// An operator, at run time, for each new shape.
void host_compiles(const char* name, const std::string& shapes);

// Scope around a task's execution.
class TaskTrace {
 public:
  // `shown`: number of the stream of a graph's node.
  TaskTrace(Queue& stream, const Task& task, int shown = -1);
  ~TaskTrace();

 private:
  const bool on_;
  Queue& stream_;
  const Task& task_;
  const int shown_;
  cost::Counters counters_;
  cost::Scope scope_;
  Clock::time_point start_;
  double modelled_start_ = 0;
};

// Scope around a call that synchronizes or copies before it returns.
class HostTrace {
 public:
  explicit HostTrace(const char* name, double copied = 0);
  ~HostTrace();

 private:
  const char* name_;
  double copied_;
  Clock::time_point start_;
  double modelled_start_ = 0;
  bool on_;
};

void flush_trace();
// The file of a profile; each call to start_profile() makes a new one. Throws if it cannot be
// written.
void start_profile(const std::string& path);
void stop_profile();

}  // namespace emu
