// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Writes to and reads from the paged KV cache. Rules: torch_npu's documentation of
// npu_scatter_pa_kv_cache and the golden functions of op-plugin's test_scatter_pa_kv_cache.py and
// test_npu_gather_pa_kv_cache.py; argument order: op-plugin's call sites.
#include "kv_cache.h"

#include "attention.h"

namespace {

using namespace emu;
using attention::refuse_given;

bool fractal_mode(const Text& cache_mode) {
  one_of<Text>("cache_mode", cache_mode, {"", "None", "Norm", "PA_NZ"});
  return cache_mode == "PA_NZ";
}

// The slots of tokens in a cache. vLLM marks padding by -1.
SlotMapping slots_in(const Tensor& cache, const Tensor& slots, bool fractal) {
  rule("scatter_pa_kv_cache.slots", !SlotMapping::has_negative(slots), "slot ",
      slots.numel() ? slots.min().item<int64_t>() : 0, " is negative; allowed: 0 or more");
  const auto shape = by_slot(cache, fractal);
  return {slots, shape.size(0) * shape.size(1)};
}

}  // namespace

namespace emu {

void check_cache(const char* name, const Tensor& cache, const char* rows_name, const Tensor& rows,
    bool fractal) {
  rank(name, cache, 4);
  same_dtype(name, cache, rows_name, rows);
  const int64_t values = rows.size(1) * rows.size(2);
  if (fractal) {
    const int64_t unit = 32 / cache.element_size();
    require(cache.size(3) == unit && cache.size(1) * unit == values, name, " has shape ",
        cache.sizes(), "; it must be [blocks, ", values / unit, ", block_size, ", unit,
        "] in cache_mode PA_NZ");
  } else {
    require(cache.size(2) == rows.size(1) && cache.size(3) == rows.size(2), name, " has shape ",
        cache.sizes(), "; it must be [blocks, block_size, ", rows.size(1), ", ", rows.size(2), "]");
  }
}

Computation gather_pages(Tensor key_cache, Tensor value_cache, Tensor tables, Tensor lengths,
    Tensor key, Tensor value, Opt<Tensor> offset, bool fractal, bool cumulative) {
  require(lengths.size(0) == tables.size(0) + (cumulative ? 1 : 0), "seq_lens has ",
      lengths.size(0), " entries for ", tables.size(0), " requests",
      cumulative ? "; cumulative lengths have one more" : "");
  check_cache("key_cache", key_cache, "key", key, fractal);
  check_cache("value_cache", value_cache, "value", value, fractal);
  COMPUTE {
    const auto count = lengths.to(at::kLong).contiguous(),
               table = tables.to(at::kLong).contiguous();
    const auto first =
        offset ? offset->to(at::kLong).contiguous() : at::zeros({tables.size(0)}, at::kLong);
    const auto from = by_slot(key_cache, fractal), values_from = by_slot(value_cache, fractal);
    const int64_t block_size = from.size(1), blocks = from.size(0);
    const auto* length = count.const_data_ptr<int64_t>();
    int64_t row = 0;
    for (int64_t i = 0; i < table.size(0); ++i) {
      const int64_t tokens =
          std::min(cumulative ? length[i + 1] - length[i] : length[i], key.size(0) - row);
      const int64_t begin = first.const_data_ptr<int64_t>()[i] / block_size;
      for (int64_t done = 0; done < tokens; done += block_size) {
        const int64_t part = std::min(block_size, tokens - done), place = begin + done / block_size;
        const int64_t block =
            place < table.size(1) ? table.const_data_ptr<int64_t>()[i * table.size(1) + place] : -1;
        for (const auto& [out, in] : {std::pair{&key, &from}, std::pair{&value, &values_from}}) {
          auto target = out->narrow(0, row + done, part);
          if (block < 0 || block >= blocks) {
            target.zero_();
            continue;
          }
          cost::partial_access(*in, target);
          target.copy_((*in)[block].narrow(0, 0, part).reshape({part, out->size(1), out->size(2)}));
        }
      }
      row += std::max<int64_t>(0, tokens);
    }
  };
}

}  // namespace emu

CHECKED(aclnnScatterPaKvCache,
    (Tensor key, Tensor key_cache, Tensor slots, Tensor value, Tensor value_cache,
        Opt<Tensor> compress_lens, Opt<Tensor> compress_offsets, Opt<Tensor> seq_lens,
        Text cache_mode, Text, Opt<Ints>, Opt<Ints>),
    {
      refuse_given("a compressed cache (compress_lens, compress_seq_offsets, seq_lens)",
          compress_lens, compress_offsets, seq_lens);
      const bool fractal = fractal_mode(cache_mode);
      rule("scatter_pa_kv_cache.cache-shapes", [&] {
        check_cache("key_cache", key_cache, "key", key, fractal);
        check_cache("value_cache", value_cache, "value", value, fractal);
      });
      COMPUTE {
        const auto where = slots_in(key_cache, slots, fractal);
        where.put(key_cache, key, fractal);
        where.put(value_cache, value, fractal);
      };
    })

CHECKED(aclnnScatterPaCache,
    (Tensor key, Tensor key_cache, Tensor slots, Opt<Tensor> compress_lens,
        Opt<Tensor> compress_offsets, Opt<Tensor> seq_lens, Text cache_mode),
    {
      refuse_given("a compressed cache (compress_lens, compress_seq_offsets, seq_lens)",
          compress_lens, compress_offsets, seq_lens);
      const bool fractal = fractal_mode(cache_mode);
      rule("scatter_pa_kv_cache.cache-shapes",
          [&] { check_cache("key_cache", key_cache, "key", key, fractal); });
      COMPUTE { slots_in(key_cache, slots, fractal).put(key_cache, key, fractal); };
    })

CHECKED(aclnnGatherPaKvCache,
    (Tensor key_cache, Tensor value_cache, Tensor tables, Tensor lengths, Tensor key, Tensor value,
        Opt<Tensor> offset, Text cache_mode, bool cumulative),
    {
      return gather_pages(key_cache, value_cache, tables, lengths, key, value, offset,
          fractal_mode(cache_mode), cumulative);
    })
