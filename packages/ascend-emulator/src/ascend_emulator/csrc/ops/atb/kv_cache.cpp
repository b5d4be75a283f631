// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// ATB's writes to and reads from paged KV caches. Rules: torch_npu's documentation of
// npu_paged_cache_load (torch_npu/op_plugin/atb/_atb_api_docs.py) and the golden functions of
// op-plugin's test_atb_reshape_and_cache*.py and test_atb_paged_cache_load.py.
#include "ops/attention/kv_cache.h"
#include "attention.h"

namespace {

using namespace emu;
using namespace emu::transformer;

enum CacheConfig : int32_t { kBoth = 0, kKeyAlone = 1, kBothFractal = 2 };

}  // namespace

// Inputs: key, value, their caches, slots; or key, its cache, slots. The caches are outputs as
// well.
ATB_PARAMETERS(ReshapeAndCache, 3, 5,
    "(key, value or key_cache, key_cache or slot_indices, value_cache, slot_indices)", {
      require_emulated(p.compress_type == 0, "compress_type ", p.compress_type, " is not emulated");
      one_of<int32_t>("kv_cache_cfg", p.config, {kBoth, kKeyAlone, kBothFractal});
      const size_t caches = p.config == kKeyAlone ? 1 : 2;
      require(in.size() == 2 * caches + 1 && out.size() == caches, in.size(), " input and ",
          out.size(), " output tensors; ", 2 * caches + 1, " and ", caches, " are expected");
      const auto slots = in.back().value;
      one_of("slot_indices", slots, {at::kInt});
      rank("slot_indices", slots, 1);
      std::vector<std::tuple<Tensor, Tensor, bool>> pairs;
      for (size_t i = 0; i < caches; ++i) {
        const char *name = i ? "value" : "key", *cache_name = i ? "value_cache" : "key_cache";
        const auto& rows = in[i].value;
        const bool nz = p.config == kBothFractal || fractal_cache(cache_name, out[i]);
        rank(name, rows, 3);
        require(rows.size(0) == slots.size(0), name, " has ", rows.size(0),
            " tokens and slot_indices ", slots.size(0));
        check_cache(cache_name, out[i].value, name, rows, nz);
        pairs.emplace_back(rows, out[i].value, nz);
      }
      COMPUTE {
        for (const auto& [rows, cache, nz] : pairs) {
          const auto shape = by_slot(cache, nz);
          SlotMapping(slots, shape.size(0) * shape.size(1)).put(cache, rows, nz);
        }
      };
    })

// config: 0 fractal, 1 not. Cumulative sequence lengths may start with a zero.
ATB_OPERATOR(AtbPagedCacheLoad,
    (Tensor key_cache, Tensor value_cache, Tensor table, Tensor lengths, Tensor key, Tensor value,
        Opt<Tensor> starts, int8_t config, bool cumulative, bool has_starts),
    {
      one_of("context_lens", lengths, {at::kInt});
      rank("context_lens", lengths, 1);
      rank("block_table", table, 2);
      require(!has_starts || starts, "seq_starts is missing");
      const auto ends = cumulative && lengths.size(0) == table.size(0)
                            ? at::empty({lengths.size(0) + 1}, lengths.options())
                            : lengths;
      const auto gather = std::make_shared<Computation>(gather_pages(key_cache, value_cache, table,
          ends, key, value, has_starts ? starts : std::nullopt, config == 0, cumulative));
      COMPUTE {
        if (!ends.is_same(lengths)) {
          ends.narrow(0, 0, 1).zero_();
          ends.narrow(0, 1, lengths.size(0)).copy_(lengths);
        }
        (*gather)();
      };
    })
