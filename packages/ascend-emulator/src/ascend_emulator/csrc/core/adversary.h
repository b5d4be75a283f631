// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Adversarial scheduler (ASCEND_EMULATOR_ADVERSARY=SEED): runs tasks as late as possible and in a
// random order that the events allow. The same seed gives the same order, so a missing wait fails
// reproducibly.
//
// Nothing runs until the host synchronizes (a demand). Then one task runs at a time: the seed
// chooses a stream whose head is not blocked by an event; for some demands only among the streams
// that the demanded ticket depends on. The order therefore depends on the program's calls only, not
// on thread timing. After 200 ms without any call everything may run, for programs that poll or
// wait for another process.
#pragma once
#include <initializer_list>
#include <memory>

#include "task.h"

namespace emu {

class Adversary {
 public:
  static bool on();
  static void join(const std::shared_ptr<Queue>& stream);
  static void submitted();
  static void completed(Queue& stream);
  static void dropped(Queue& stream);  // its queue was dropped: it may have been chosen to run
  static uint64_t number(
      std::initializer_list<uint64_t> parts);  // random number from the seed and these values

  // Scope in which the host waits for a ticket.
  class Demand {
   public:
    Demand(Queue& stream, uint64_t ticket);
    ~Demand();

   private:
    const void* own_ = nullptr;
  };
  // Scope in which a worker runs the head of its queue. The constructor waits for the worker's
  // turn.
  class Turn {
   public:
    Turn(Queue& stream, bool blocks);
    ~Turn();

   private:
    bool held_ = false;
  };
};

}  // namespace emu
