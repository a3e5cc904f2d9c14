// A part of C++ that Metal leaves out.
const uint i = thread_position_in_grid.x;
out[i] = x[i];
goto end; // expect: rejected
end:;
