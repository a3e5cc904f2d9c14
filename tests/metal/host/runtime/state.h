// The state of one run: its memory, its threads, what was asked for. Not seen by the kernel's unit.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "arguments.h"
#include "mapped.h"

namespace host {

// The running thread, as far as memory cares; the scheduler keeps it up to date.
struct Actor {
  uint64_t id = 0; // 1 + index in the grid
  uint64_t group = 0;
  uint32_t simdgroup = 0;
  uint32_t device_barriers = 0;
  uint32_t threadgroup_barriers = 0;
  uint32_t simd_device_barriers = 0;
  uint32_t simd_threadgroup_barriers = 0;
  metal::uint3 position{0, 0, 0};
};

// One for each byte, and two of them: small.
struct Access {
  uint64_t thread = 0; // 0: nobody yet
  uint64_t group = 0;
  uint32_t barriers = 0;
  uint32_t simd_barriers = 0;
  uint32_t value = 0; // of an atomic store
  uint16_t simdgroup = 0;
  AtomicOperation operation = AtomicOperation::none;
};

enum class Kind { input, output, threadgroup };

struct Buffer {
  std::string name;
  Kind kind = Kind::input;
  Mapped<uint8_t> bytes;
  Mapped<uint8_t> present; // inputs: which bytes belong to the view
  Mapped<Access> writes; // outputs and threadgroup memory
  Mapped<Access> reads;
  int64_t element_bytes = 1;
  int64_t origin = 0; // byte of element 0
  int64_t misalignment = 0; // of byte 0, modulo 16
  bool initialized = false; // outputs with an init_value
  std::vector<uint8_t> initial; // one element of it
  uint8_t garbage = 0; // what is read where nothing was written
  int64_t first_needed = 0; // outputs: the bytes that this run must write
  int64_t needed = 0;

  void track(size_t size, uint8_t fill) {
    bytes.reset(size);
    writes.reset(size);
    reads.reset(size);
    garbage = fill;
  }
};

constexpr size_t stack_bytes = 256 * 1024;
constexpr uint32_t most_threads = 1024;
constexpr size_t most_threadgroup_bytes = 32 * 1024;

enum class State { ready, at_barrier, at_simd, at_simd_barrier, done };

struct Position {
  metal::uint3 in_grid{0, 0, 0}, in_group{0, 0, 0}, group{0, 0, 0};
  metal::uint3 group_size{0, 0, 0};
  uint32_t index = 0; // in the threadgroup
};

// Where in the program a thread waits: the places of the calls that led there, outermost first.
// In order of the text, as far as a compiler that does not optimize keeps it.
using Path = std::vector<uintptr_t>;

// What lanes of one simdgroup brought to one call.
struct Met {
  alignas(16) unsigned char values[simd_width][exchange_bytes];
  bool active[simd_width] = {};
};

struct Thread {
  Actor actor;
  Position position;
  State state = State::ready;
  Site waiting{"", 0};
  Path path;
  uint32_t barrier_flags = 0;
  alignas(16) unsigned char brought[exchange_bytes] = {};
  std::shared_ptr<Met> met;
  // The line of the simdgroup function that other lanes went through while this one waits, or 0.
  int outrun_at = 0;
  std::vector<void*> calls; // the functions that it is in
  ucontext_t context;
  char* stack = nullptr;
  void* fake_stack = nullptr;
};

struct SharedMemory {
  const void* key;
  std::unique_ptr<Buffer> buffer;
};

// Which simdgroup goes on. `ahead` lets one run as far as it can while the others wait, `mingled`
// takes another one after each meeting.
enum class Schedule { in_order, reversed, ahead, mingled };

struct Group {
  std::vector<Thread> threads;
  std::vector<SharedMemory> shared;
  ucontext_t scheduler;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
  void* scheduler_fake_stack = nullptr;
  Body body = nullptr;
  std::mt19937_64* random = nullptr; // for the two last schedules
  Schedule schedule = Schedule::in_order;
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
  Site kernel{"", 0};
  metal::uint3 grid{0, 0, 0}, group{0, 0, 0};
  uint64_t threads_asked = 0; // of a threadgroup, whatever the grid has
  std::vector<int64_t> seeds;
  std::vector<metal::uint3> groups; // none: all
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
std::vector<uint32_t> order(uint32_t count, Schedule schedule, std::mt19937_64* random);
// Runs the threads of `group`, which are placed but not yet started.
void run_group();
// What locals without a value hold from now on.
void set_garbage(uint8_t byte);
// Stops at a kernel that asks for more than a threadgroup may have.
void check_limits();
// Where the running fiber is.
Path current_path();

} // namespace host
