// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Interpolation, sampling on grids and padding by reflection or replication, with their gradients.
// Scales <= 0 are ignored.
#include "families.h"

// The older versions have no scales: op-plugin drops them.
OP(aclnnUpsampleNearest1d, (Tensor self, Ints size, Tensor out),
    { out.copy_(at::upsample_nearest1d(upcast(self), size)); })
OP(aclnnUpsampleNearest2d, (Tensor self, Ints size, Tensor out),
    { out.copy_(at::upsample_nearest2d(upcast(self), size)); })

OP(aclnnAffineGrid, (Tensor theta, Ints size, bool align, Tensor out),
    { out.copy_(at::affine_grid_generator(upcast(theta), size, align)); })
