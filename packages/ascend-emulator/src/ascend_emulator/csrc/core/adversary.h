// The adversarial mode (ASCEND_EMULATOR_ADVERSARY=SEED): streams run as late and in as odd an order as events allow, and the same
// seed gives the same order again, so that a missing wait fails reproducibly.
//
// Nothing runs until the host demands it: by synchronizing. One task then runs at a time, of a stream
// that the seed chooses among those whose head waits for nothing that is undone; in some demands only among those that the
// demanded point depends on. So the order follows from the program's own calls, and not from when threads wake. What nobody
// demands runs after a fifth of a second without any call, for a program that polls, or waits for another process.
#ifndef ASCEND_EMULATOR_CORE_ADVERSARY_H
#define ASCEND_EMULATOR_CORE_ADVERSARY_H
#include <memory>

#include "stream.h"

namespace emu {

// What stands at the head of a stream's queue.
struct Head {
  bool any = false;
  std::shared_ptr<Mark> waits_for{};
};

class Adversary {
 public:
  static Head head(Stream& stream);
  static bool on();
  static void join(const std::shared_ptr<Stream>& stream);
  static void submitted();
  static void completed(Stream& stream);
  static uint64_t number(std::initializer_list<uint64_t> parts);  // from the seed and these

  // The host waits for the ticket while this lives.
  class Demand {
   public:
    Demand(Stream& stream, uint64_t ticket);
    ~Demand();

   private:
    const void* own_ = nullptr;
  };
  // A worker runs its head while this lives; making one waits for its turn.
  class Turn {
   public:
    Turn(Stream& stream, const Task& task);
    ~Turn();

   private:
    bool held_ = false;
  };
};

}  // namespace emu

#endif  // ASCEND_EMULATOR_CORE_ADVERSARY_H
