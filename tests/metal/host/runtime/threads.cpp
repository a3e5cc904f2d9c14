// Threads of a threadgroup as fibers that meet at barriers and in simdgroup functions.
//
// One fiber runs at a time, up to its next meeting. The lanes of a simdgroup run one after the
// other, and the simdgroup goes on from a meeting without the other simdgroups, as far as the
// next threadgroup barrier: how far ahead of the others depends on the schedule.
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>

#include <algorithm>
#include <cstring>
#include <numeric>

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
  self->path = current_path();
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

// Frames are linked by their first word, with the place of the call beside it.
Path current_path() {
  Path path;
  const uintptr_t low = reinterpret_cast<uintptr_t>(self->stack);
  uintptr_t frame = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  while (frame > low && frame < low + stack_bytes - 2 * sizeof(uintptr_t)) {
    const uintptr_t* words = reinterpret_cast<const uintptr_t*>(frame);
    path.push_back(words[1]);
    if (words[0] <= frame) {
      break;
    }
    frame = words[0];
  }
  std::reverse(path.begin(), path.end());
  return path;
}

std::vector<uint32_t> order(uint32_t count, Schedule schedule, std::mt19937_64* random) {
  std::vector<uint32_t> indices(count);
  std::iota(indices.begin(), indices.end(), 0);
  if (schedule == Schedule::reversed) {
    std::reverse(indices.begin(), indices.end());
  } else if (schedule != Schedule::in_order) {
    std::shuffle(indices.begin(), indices.end(), *random);
  }
  return indices;
}

static size_t simdgroup_count() { return (group->threads.size() + simd_width - 1) / simd_width; }

struct LaneRange {
  Thread* first;
  Thread* last;
  Thread* begin() const { return first; }
  Thread* end() const { return last; }
};

static LaneRange lanes_of(size_t simdgroup) {
  Thread* threads = group->threads.data();
  const size_t first = simdgroup * simd_width;
  return {threads + first, threads + std::min(group->threads.size(), first + simd_width)};
}

static bool waits_for_lanes(const Thread& thread) {
  return thread.state == State::at_simd || thread.state == State::at_simd_barrier;
}

static const char* whereabouts(const Thread& thread) {
  return thread.state == State::done ? "has returned" : "waits elsewhere";
}

[[noreturn]] static void refuse_barrier(Site site, const char* whose, const Thread& other) {
  const metal::uint3 who = other.position.in_grid;
  report(
      "barrier-divergence", site,
      "not every thread of the %s comes to this barrier: thread (%u, %u, %u) %s (line %d)", whose,
      who.x, who.y, who.z, whereabouts(other), other.waiting.line);
  stop();
}

// A part of a simdgroup may use its functions while the rest waits for it: further down in the
// text, behind the branch or the loop. Then the rest must find it there.
static void check_outrun(const std::vector<Thread*>& met) {
  const Thread* outrun = nullptr;
  for (const Thread* thread : met) {
    if (thread->outrun_at == 0) {
      return;
    }
    outrun = thread;
  }
  report(
      "simd-divergence", outrun->waiting,
      "some lanes of a simdgroup take part here and the others at line %d", outrun->outrun_at);
  stop();
}

// Lets those lanes go on that wait in one simdgroup function: the first one in the text.
static bool release_simdgroup(size_t number) {
  const LaneRange lanes = lanes_of(number);
  const Thread* first = nullptr;
  for (const Thread& thread : lanes) {
    if (thread.state == State::ready) {
      return false;
    }
    if (waits_for_lanes(thread) && (first == nullptr || thread.path < first->path)) {
      first = &thread;
    }
  }
  if (first == nullptr) {
    return false;
  }
  const Path path = first->path;
  const Site site = first->waiting;
  const bool is_barrier = first->state == State::at_simd_barrier;
  std::vector<Thread*> met;
  auto shared = std::make_shared<Met>();
  for (Thread& thread : lanes) {
    if (!waits_for_lanes(thread) || thread.path != path) {
      if (is_barrier) {
        refuse_barrier(site, "simdgroup", thread);
      }
      continue;
    }
    const size_t lane = &thread - lanes.first;
    std::memcpy(shared->values[lane], thread.brought, exchange_bytes);
    shared->active[lane] = true;
    met.push_back(&thread);
  }
  check_outrun(met);
  for (Thread& thread : lanes) {
    if (waits_for_lanes(thread) && thread.path != path) {
      thread.outrun_at = site.line;
    }
  }
  for (Thread* thread : met) {
    thread->met = shared;
    thread->outrun_at = 0;
    thread->state = State::ready;
  }
  return true;
}

// Lets the whole group go on from a barrier that all its threads have come to.
static void release_barrier() {
  const Thread* waiting = nullptr;
  for (const Thread& thread : group->threads) {
    if (thread.state == State::at_barrier && waiting == nullptr) {
      waiting = &thread;
    }
  }
  for (const Thread& thread : group->threads) {
    if (thread.state != State::at_barrier || thread.path != waiting->path) {
      refuse_barrier(waiting->waiting, "threadgroup", thread);
    }
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

static bool has_ready(size_t simdgroup) {
  const LaneRange lanes = lanes_of(simdgroup);
  return std::any_of(
      lanes.begin(), lanes.end(), [](const Thread& each) { return each.state == State::ready; });
}

// The simdgroup to go on with after `last`, or the number of simdgroups when none can.
static size_t next_simdgroup(size_t last) {
  const size_t count = simdgroup_count();
  std::vector<size_t> able;
  for (size_t i = 0; i < count; ++i) {
    if (has_ready(i)) {
      able.push_back(i);
    }
  }
  if (able.empty()) {
    return count;
  }
  switch (group->schedule) {
    case Schedule::in_order: return able.front();
    case Schedule::reversed: return able.back();
    case Schedule::ahead:
      if (std::find(able.begin(), able.end(), last) != able.end()) {
        return last;
      }
      break;
    case Schedule::mingled: break;
  }
  return able[(*group->random)() % able.size()];
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
  size_t chosen = simdgroup_count();
  while (true) {
    chosen = next_simdgroup(chosen);
    if (chosen == simdgroup_count()) {
      const bool waiting = std::any_of(
          group->threads.begin(), group->threads.end(),
          [](const Thread& each) { return each.state != State::done; });
      if (!waiting) {
        return;
      }
      release_barrier();
      continue;
    }
    const LaneRange lanes = lanes_of(chosen);
    for (uint32_t lane : order(lanes.last - lanes.first, group->schedule, group->random)) {
      if (lanes.first[lane].state == State::ready) {
        resume(lanes.first[lane]);
      }
    }
    release_simdgroup(chosen);
  }
}

static void run_group_in_turn() {
  for (uint32_t i : order(group->threads.size(), group->schedule, group->random)) {
    self = &group->threads[i];
    actor = &self->actor;
    group->body();
  }
}

void run_group() {
  group->fibers ? run_group_in_fibers() : run_group_in_turn();
  self = nullptr;
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
  std::memcpy(self->brought, value, size);
  wait_here(State::at_simd, site);
  return {self->met->values, self->met->active, self->position.index % simd_width};
}

void meet_simdgroup_barrier(uint32_t flags, Site site) {
  wait_here(State::at_simd_barrier, site);
  self->actor.simd_threadgroup_barriers += flags & 2 ? 1 : 0;
  self->actor.simd_device_barriers += flags & 1 ? 1 : 0;
}

void meet_threadgroup_barrier(uint32_t flags, Site site) {
  self->barrier_flags = flags;
  wait_here(State::at_barrier, site);
}

} // namespace host
