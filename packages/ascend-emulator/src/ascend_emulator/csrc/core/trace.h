// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Trace of the device's tasks (ASCEND_EMULATOR_TRACE=FILE, and the file of a running profile), and
// their estimated device time by a roofline model.
//
// The model: the launch overhead plus the maximum of FLOPs / throughput, bytes / memory bandwidth
// and link bytes / link bandwidth. Streams run in parallel; an event passes the time of its record
// to the streams that wait for it. The host is assumed to be fast enough. The chips' figures and
// their sources are in chips.toml. The result is an estimate.
#pragma once
#include "cost.h"
#include "task.h"

namespace emu {

bool trace_enabled();  // whether Task::work is to be filled in

// Scope around a task's execution.
class TaskTrace {
 public:
  TaskTrace(Queue& stream, const Task& task);
  ~TaskTrace();

 private:
  const bool on_;
  Queue& stream_;
  const Task& task_;
  cost::Counters counters_;
  cost::Scope scope_;
  Clock::time_point start_;
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
  bool on_;
};

double modelled_seconds(Kind kind, const Work& work, bool in_graph);
void flush_trace();
// The file of a profile; each call to start_profile() makes a new one. Throws if it cannot be
// written.
void start_profile(const std::string& path);
void stop_profile();

}  // namespace emu
