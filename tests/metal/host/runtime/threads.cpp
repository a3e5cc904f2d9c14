// Threads of a threadgroup as fibers that meet at barriers and in simdgroup functions.
//
// One fiber runs at a time, up to its next meeting; the order in which they run is shuffled anew
// for every round. A meeting is over when all threads that it concerns have come; threads that
// wait in different places, or that returned while others wait, are a finding.
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>

#include <algorithm>
#include <cstring>

#include "state.h"

namespace host {

Group* group = nullptr;
Thread* self = nullptr;

static void arrive_in_fiber(const void** stack, size_t* bytes, void* fake_stack) {
  __sanitizer_finish_switch_fiber(fake_stack, stack, bytes);
}

static void leave_for(void** fake_stack, const void* stack, size_t bytes) {
  __sanitizer_start_switch_fiber(fake_stack, stack, bytes);
}

static void fiber_main() {
  arrive_in_fiber(&group->scheduler_stack, &group->scheduler_stack_bytes, nullptr);
  group->body();
  self->state = State::done;
  leave_for(nullptr, group->scheduler_stack, group->scheduler_stack_bytes);
  swapcontext(&self->context, &group->scheduler);
}

static void wait_here(State state, Site site) {
  if (!group->fibers) {
    report("internal", site, "a meeting of threads in a kernel that was taken to have none");
    stop();
  }
  self->state = state;
  self->waiting = site;
  Thread* waiting = self;
  leave_for(&waiting->fake_stack, group->scheduler_stack, group->scheduler_stack_bytes);
  swapcontext(&waiting->context, &group->scheduler);
  arrive_in_fiber(&group->scheduler_stack, &group->scheduler_stack_bytes, waiting->fake_stack);
}

static void resume(Thread& thread) {
  self = &thread;
  actor = &thread.actor;
  leave_for(&group->scheduler_fake_stack, thread.stack, stack_bytes);
  swapcontext(&group->scheduler, &thread.context);
  arrive_in_fiber(nullptr, nullptr, group->scheduler_fake_stack);
}

std::vector<uint32_t> order(uint32_t count, std::mt19937_64* random, bool reversed) {
  std::vector<uint32_t> indices(count);
  for (uint32_t i = 0; i < count; ++i) {
    indices[i] = reversed ? count - 1 - i : i;
  }
  if (random != nullptr) {
    std::shuffle(indices.begin(), indices.end(), *random);
  }
  return indices;
}

// Lets a simdgroup go on whose lanes have all come to one simdgroup function.
static bool release_simdgroup(uint32_t number) {
  const size_t first = size_t(number) * simd_width;
  const size_t last = std::min(group->threads.size(), first + simd_width);
  const Thread* waiting = nullptr;
  for (size_t i = first; i < last; ++i) {
    const Thread& thread = group->threads[i];
    if (thread.state == State::done) {
      continue;
    }
    if (thread.state != State::at_simd) {
      return false;
    }
    if (waiting != nullptr && (waiting->waiting.line != thread.waiting.line)) {
      report(
          "simd-divergence", thread.waiting,
          "lanes of one simdgroup wait here and at line %d in different simdgroup functions",
          waiting->waiting.line);
      stop();
    }
    waiting = &thread;
  }
  if (waiting == nullptr) {
    return false;
  }
  for (size_t i = first; i < last; ++i) {
    Thread& thread = group->threads[i];
    if (thread.state == State::at_simd) {
      thread.state = State::ready;
    } else {
      group->exchanges[number].active[0][i - first] = false;
      group->exchanges[number].active[1][i - first] = false;
    }
  }
  return true;
}

// Lets the whole group go on from a barrier that all its threads have come to.
static void release_barrier() {
  const Thread* waiting = nullptr;
  const Thread* elsewhere = nullptr;
  for (const Thread& thread : group->threads) {
    if (thread.state == State::at_barrier && waiting == nullptr) {
      waiting = &thread;
    }
  }
  for (const Thread& thread : group->threads) {
    if (waiting == nullptr || thread.state != State::at_barrier ||
        thread.waiting.line != waiting->waiting.line) {
      elsewhere = &thread;
    }
  }
  if (elsewhere != nullptr) {
    const Site site = waiting != nullptr ? waiting->waiting : elsewhere->waiting;
    const metal::uint3 who = elsewhere->position.in_grid;
    report(
        "barrier-divergence", site,
        "not every thread of the threadgroup comes to this barrier: thread (%u, %u, %u) %s (line %d)",
        who.x, who.y, who.z, elsewhere->state == State::done ? "has returned" : "waits elsewhere",
        elsewhere->waiting.line);
    stop();
  }
  for (Thread& thread : group->threads) {
    thread.actor.threadgroup_barriers += thread.barrier_flags & 2 ? 1 : 0;
    thread.actor.device_barriers += thread.barrier_flags & 1 ? 1 : 0;
    thread.state = State::ready;
  }
}

// Stacks are used again by the next threadgroup. A fiber ends without unwinding its frames, so
// whatever the sanitizer marked in them is wiped.
static char* stack_for(size_t index) {
  static std::vector<std::unique_ptr<char[]>> stacks;
  while (stacks.size() <= index) {
    stacks.emplace_back(new char[stack_bytes]);
  }
  __asan_unpoison_memory_region(stacks[index].get(), stack_bytes);
  return stacks[index].get();
}

static void run_group_in_fibers() {
  for (Thread& thread : group->threads) {
    thread.stack = stack_for(thread.position.index);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack;
    thread.context.uc_stack.ss_size = stack_bytes;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, fiber_main, 0);
  }
  const uint32_t count = group->threads.size();
  group->exchanges.assign((count + simd_width - 1) / simd_width, Exchange());
  while (true) {
    bool all_done = true;
    for (uint32_t i : order(count, group->random, group->reversed)) {
      if (group->threads[i].state == State::ready) {
        resume(group->threads[i]);
      }
      all_done = all_done && group->threads[i].state == State::done;
    }
    if (all_done) {
      return;
    }
    bool released = false;
    for (uint32_t i = 0; i < group->exchanges.size(); ++i) {
      released = release_simdgroup(i) || released;
    }
    if (!released) {
      release_barrier();
    }
  }
}

static void run_group_in_turn() {
  for (uint32_t i : order(group->threads.size(), group->random, group->reversed)) {
    self = &group->threads[i];
    actor = &self->actor;
    group->body();
  }
}

void run_group() {
  group->fibers ? run_group_in_fibers() : run_group_in_turn();
}

Buffer* shared_buffer(const void* key, const char* name, size_t element, size_t count) {
  for (SharedMemory& each : group->shared) {
    if (each.key == key) {
      return each.buffer.get();
    }
  }
  auto buffer = std::make_unique<Buffer>();
  buffer->name = name;
  buffer->kind = Kind::threadgroup;
  buffer->element_bytes = element;
  buffer->track(element * count, 0xa5);
  group->shared.push_back({key, std::move(buffer)});
  return group->shared.back().buffer.get();
}

Meeting meet_simdgroup(const void* value, size_t size, Site site) {
  const uint32_t lane = self->position.index % simd_width;
  const uint32_t parity = self->simd_calls++ % 2;
  if (!group->fibers) {
    wait_here(State::at_simd, site);
  }
  Exchange& exchange = group->exchanges[self->position.index / simd_width];
  std::memcpy(exchange.values[parity][lane], value, size);
  exchange.active[parity][lane] = true;
  wait_here(State::at_simd, site);
  // All have come here, so nobody reads the meeting before this one any more.
  exchange.active[1 - parity][lane] = false;
  return {exchange.values[parity], exchange.active[parity], lane};
}

void meet_simdgroup_barrier(uint32_t flags, Site site) {
  const uint32_t nothing = 0;
  meet_simdgroup(&nothing, sizeof nothing, site);
  self->actor.simd_threadgroup_barriers += flags & 2 ? 1 : 0;
  self->actor.simd_device_barriers += flags & 1 ? 1 : 0;
}

void meet_threadgroup_barrier(uint32_t flags, Site site) {
  self->barrier_flags = flags;
  wait_here(State::at_barrier, site);
}

} // namespace host
