// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Bounded string functions of CANN's libc_sec.so, which torchair's libraries call without being
// linked against it. The text that does not fit is an error, not cut off.
#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "status.h"

EXPORT int vsnprintf_s(char* to, size_t size, size_t count, const char* format, va_list values) {
  if (!to || !format || size == 0) return -1;
  const size_t available = std::min(size - 1, count) + 1;
  const int length = std::vsnprintf(to, available, format, values);
  return length < 0 || static_cast<size_t>(length) >= available ? -1 : length;
}

EXPORT int snprintf_s(char* to, size_t size, size_t count, const char* format, ...) {
  va_list values;
  va_start(values, format);
  const int length = vsnprintf_s(to, size, count, format, values);
  va_end(values);
  return length;
}

EXPORT int strcpy_s(char* to, size_t size, const char* from) {
  if (!to || !from) return EINVAL;
  const size_t length = std::strlen(from);
  if (length >= size) return ERANGE;
  std::memcpy(to, from, length + 1);
  return 0;
}
