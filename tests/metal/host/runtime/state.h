// The state of one run: its memory, its threads, what was asked for. Not seen by the kernel's unit.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "arguments.h"

namespace host {

// The running thread, as far as memory cares; the scheduler keeps it up to date.
struct Actor {
  uint32_t id = 0; // 1 + index in the grid
  uint32_t group = 0;
  uint32_t simdgroup = 0;
  uint32_t device_barriers = 0;
  uint32_t threadgroup_barriers = 0;
  uint32_t simd_device_barriers = 0;
  uint32_t simd_threadgroup_barriers = 0;
  metal::uint3 position{0, 0, 0};
};

struct Access {
  uint32_t thread = 0; // 0: nobody yet
  uint32_t group = 0;
  uint32_t simdgroup = 0;
  uint32_t barriers = 0;
  uint32_t simd_barriers = 0;
  bool atomic = false;
};

enum class Kind { input, output, threadgroup };

struct Buffer {
  std::string name;
  Kind kind = Kind::input;
  std::vector<uint8_t> bytes;
  std::vector<uint8_t> present; // inputs: which bytes belong to the view
  std::vector<Access> writes; // outputs and threadgroup memory
  std::vector<Access> reads;
  int64_t element_bytes = 1;
  int64_t origin = 0; // byte of element 0
  int64_t misalignment = 0; // of byte 0, modulo 16
  bool initialized = false; // outputs with an init_value

  void track(size_t size, uint8_t fill) {
    bytes.assign(size, fill);
    writes.assign(size, Access());
    reads.assign(size, Access());
  }
};

constexpr size_t stack_bytes = 256 * 1024;

enum class State { ready, at_barrier, at_simd, done };

struct Position {
  metal::uint3 in_grid{0, 0, 0}, in_group{0, 0, 0}, group{0, 0, 0};
  metal::uint3 group_size{0, 0, 0};
  uint32_t index = 0; // in the threadgroup
};

struct Thread {
  Actor actor;
  Position position;
  State state = State::ready;
  Site waiting{"", 0};
  uint32_t barrier_flags = 0;
  uint32_t simd_calls = 0;
  ucontext_t context;
  char* stack = nullptr;
  void* fake_stack = nullptr;
};

// What the lanes of one simdgroup lay open to each other: two meetings, since a lane may already
// come to the next one while another still reads the last.
struct Exchange {
  alignas(16) unsigned char values[2][simd_width][exchange_bytes];
  bool active[2][simd_width] = {};
};

struct SharedMemory {
  const void* key;
  std::unique_ptr<Buffer> buffer;
};


struct Group {
  std::vector<Thread> threads;
  std::vector<Exchange> exchanges;
  std::vector<SharedMemory> shared;
  ucontext_t scheduler;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
  void* scheduler_fake_stack = nullptr;
  Body body = nullptr;
  std::mt19937_64* random = nullptr; // null: in order
  bool reversed = false;
  bool fibers = false;
};

struct Array {
  std::unique_ptr<Buffer> buffer;
  std::vector<int32_t> shape_values;
  std::vector<int64_t> strides_values;
  std::unique_ptr<Buffer> shape;
  std::unique_ptr<Buffer> strides;
  int32_t ndim = 0;
};

struct Request {
  metal::uint3 grid{0, 0, 0}, group{0, 0, 0};
  std::vector<int64_t> seeds;
  std::vector<Array> inputs;
  std::vector<std::unique_ptr<Buffer>> outputs;
};

extern Actor* actor;
extern Group* group;
extern Thread* self;
extern Request request;

bool has_findings();
void print_findings();
// For what leaves no sensible way on, such as a barrier that not all threads reach.
[[noreturn]] void stop();
std::vector<uint32_t> order(uint32_t count, std::mt19937_64* random, bool reversed);
// Runs the threads of `group`, which are placed but not yet started.
void run_group();

} // namespace host
