// Two branches with a barrier each, on one line.
const uint i = thread_position_in_grid.x;
out[i] = x[i];
if (i % 2) { threadgroup_barrier(mem_flags::mem_none); } else { threadgroup_barrier(mem_flags::mem_none); } // expect: barrier-divergence
