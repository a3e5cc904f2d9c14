// What the program is asked to run.
#pragma once

#include "state.h"

namespace host {

// Reads the request of a program from standard input; ends the process when it is cut short.
void read_request(const Program& program);

} // namespace host
