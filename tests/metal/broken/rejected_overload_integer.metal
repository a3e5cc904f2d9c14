// There is an exp of half and one of float, and none of int.
const uint i = thread_position_in_grid.x;
out[i] = exp(int(i)); // expect: rejected
