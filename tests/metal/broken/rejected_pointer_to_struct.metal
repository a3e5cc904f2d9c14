// The same in a cast to a type of the header.
const uint i = thread_position_in_grid.x;
Pack<float, 2> pack = {{x[i], x[i]}};
out[i] = ((const Pack<float, 2>*)&pack)->lane[0]; // expect: rejected
