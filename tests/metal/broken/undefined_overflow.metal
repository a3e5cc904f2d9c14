// A signed sum that overflows.
const uint i = thread_position_in_grid.x;
const int large = 2147483647 - 10;
const int sum = large + int(i); // expect: undefined
out[i] = float(sum);
