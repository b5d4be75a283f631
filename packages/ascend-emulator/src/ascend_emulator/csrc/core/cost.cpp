#include "cost.h"

#include <algorithm>
#include <utility>

namespace emu::cost {
namespace {

thread_local Sheet* sheet = nullptr;

}  // namespace

Sheet* current() { return sheet; }

Open::Open(Sheet* mine) : before_(std::exchange(sheet, mine)) {}
Open::~Open() { sheet = before_; }

void touches(const void* argument, size_t size, double bytes) {
  if (!sheet) return;
  std::lock_guard lock(sheet->mutex);
  if (std::find(sheet->parts.begin(), sheet->parts.end(), argument) == sheet->parts.end()) {
    sheet->parts.push_back(argument);
    sheet->bytes -= static_cast<double>(size);
  }
  sheet->bytes += bytes;
}

void operates(double flops, int item) {
  if (!sheet) return;
  std::lock_guard lock(sheet->mutex);
  sheet->flops += flops;
  sheet->item = item;
}

}  // namespace emu::cost
