// What an operator moves and computes, where the sizes of its arguments do not say: it touches a part of a cache, or multiplies
// matrices inside. Operators tell while they compute; Observation (trace.h) adds it to their Work.
#ifndef ASCEND_EMULATOR_CORE_COST_H
#define ASCEND_EMULATOR_CORE_COST_H
#include <cstddef>
#include <mutex>
#include <vector>

namespace emu::cost {

struct Sheet {  // of one run of an operator
  std::mutex mutex;
  double bytes = 0, flops = 0;  // more or less than by the sizes of the arguments; instead of what the shapes suggest
  int item = 0;
  std::vector<const void*> parts;  // tensors that are touched in part
};

Sheet* current();  // the thread's, null unless somebody observes

// Makes a sheet the thread's; for threads that an operator hands work to, too.
class Open {
 public:
  explicit Open(Sheet* sheet);
  ~Open();

 private:
  Sheet* before_;
};

// Of an argument of `size` bytes, the operator touches so many, not all; several calls add up.
void touches(const void* argument, size_t size, double bytes);
// Operations on elements of `item` bytes.
void operates(double flops, int item);

}  // namespace emu::cost

#endif  // ASCEND_EMULATOR_CORE_COST_H
