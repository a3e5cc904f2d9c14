// Runs one kernel over its grid and reports. The generated unit supplies the program.
//
// A seed of 0 runs in order, 1 in reverse, any other one in a shuffled order: an even one lets
// single simdgroups run far ahead of the others, an odd one mingles them. The first seed runs
// with other garbage than the rest in whatever was never written. What the outputs hold after it
// goes to the file named by the first argument, one after another; findings, and a last line
// "done", go to standard output.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "request.h"

namespace host {

// The threads of one threadgroup; those at the end of the grid may be smaller.
static void place_threads(Group& made, metal::uint3 at) {
  const metal::uint3 grid = request.grid, full = request.group;
  const metal::uint3 first{at.x * full.x, at.y * full.y, at.z * full.z};
  const metal::uint3 size{std::min(full.x, grid.x - first.x), std::min(full.y, grid.y - first.y),
                          std::min(full.z, grid.z - first.z)};
  const metal::uint3 groups{(grid.x + full.x - 1) / full.x, (grid.y + full.y - 1) / full.y, 0};
  made.threads = std::vector<Thread>(size_t(size.x) * size.y * size.z);
  uint32_t index = 0;
  for (uint32_t z = 0; z < size.z; ++z) {
    for (uint32_t y = 0; y < size.y; ++y) {
      for (uint32_t x = 0; x < size.x; ++x, ++index) {
        Thread& thread = made.threads[index];
        Position& position = thread.position;
        position.in_group = {x, y, z};
        position.in_grid = {first.x + x, first.y + y, first.z + z};
        position.group = at;
        position.group_size = size;
        position.index = index;
        const metal::uint3 p = position.in_grid;
        thread.actor.id = 1 + p.x + uint64_t(grid.x) * (p.y + uint64_t(grid.y) * p.z);
        thread.actor.group = at.x + uint64_t(groups.x) * (at.y + uint64_t(groups.y) * at.z);
        thread.actor.simdgroup = index / simd_width;
        thread.actor.position = p;
      }
    }
  }
}

// Of a grid that runs in part, only what this part writes.
static void check_written(const Buffer& buffer) {
  int64_t missing = 0, first = -1;
  const int64_t step = buffer.element_bytes;
  for (int64_t i = buffer.first_needed; i < buffer.first_needed + buffer.needed; i += step) {
    bool written = buffer.initialized;
    if (!written) {
      written = true;
      for (int64_t byte = i; byte < i + step; ++byte) written = written && buffer.writes[byte].thread != 0;
    }
    if (!written) {
      first = first < 0 ? i / step : first;
      ++missing;
    }
  }
  if (missing > 0) {
    report("unwritten", request.kernel, "%lld of %lld elements of %s were not written, the first is [%lld]",
           static_cast<long long>(missing), static_cast<long long>(buffer.needed / step),
           buffer.name.c_str(), static_cast<long long>(first));
  }
}

static Schedule schedule_of(int64_t seed) {
  if (seed < 2) {
    return seed == 0 ? Schedule::in_order : Schedule::reversed;
  }
  return seed % 2 == 0 ? Schedule::ahead : Schedule::mingled;
}

// The threadgroups to run, in order.
static std::vector<metal::uint3> threadgroups() {
  if (!request.groups.empty()) {
    return request.groups;
  }
  const metal::uint3 count = attribute::threadgroups_per_grid();
  std::vector<metal::uint3> all;
  for (uint32_t z = 0; z < count.z; ++z) {
    for (uint32_t y = 0; y < count.y; ++y) {
      for (uint32_t x = 0; x < count.x; ++x) all.push_back({x, y, z});
    }
  }
  return all;
}

static void run_grid(int64_t seed, const Program& program) {
  std::mt19937_64 random(seed);
  const std::vector<metal::uint3> all = threadgroups();
  for (uint32_t number : order(all.size(), schedule_of(seed), &random)) {
    Group made;
    made.body = program.body;
    made.random = &random;
    made.schedule = schedule_of(seed);
    made.fibers = program.fibers;
    place_threads(made, all[number]);
    group = &made;
    run_group();
    group = nullptr;
  }
}

using Bytes = std::vector<uint8_t>;

// One run; what the needed part of each output then holds.
static std::vector<Bytes> outputs_of_run(int64_t seed, uint8_t garbage, const Program& program) {
  for (auto& output : request.outputs) output->track(output->bytes.size(), garbage);
  set_garbage(garbage);
  run_grid(seed, program);
  std::vector<Bytes> held;
  for (auto& output : request.outputs) {
    check_written(*output);
    Bytes bytes(output->needed);
    for (int64_t i = 0; i < output->needed; ++i) {
      const int64_t at = output->first_needed + i;
      const bool written = output->writes[at].thread != 0 || !output->initialized;
      bytes[i] = written ? output->bytes[at] : output->initial[at % output->element_bytes];
    }
    held.push_back(std::move(bytes));
  }
  return held;
}

static void compare(const std::vector<Bytes>& first, const std::vector<Bytes>& other, const char* kind, const char* when) {
  // What follows from an earlier finding is no finding of its own.
  for (size_t i = 0; i < first.size() && !has_findings(); ++i) {
    const auto differing = std::mismatch(first[i].begin(), first[i].end(), other[i].begin());
    if (differing.first != first[i].end()) {
      const Buffer& output = *request.outputs[i];
      const int64_t byte = output.first_needed + (differing.first - first[i].begin());
      report(kind, request.kernel, "%s[%lld] differs when %s", output.name.c_str(),
             static_cast<long long>(byte / output.element_bytes), when);
    }
  }
}

int run(const char* outputs_path, const Program& program) {
  read_request(program);
  check_limits();
  const std::vector<Bytes> first = outputs_of_run(request.seeds[0], 0x5a, program);
  for (size_t i = 1; i < request.seeds.size(); ++i) {
    const std::vector<Bytes> other = outputs_of_run(request.seeds[i], 0xc3, program);
    if (other != first && !has_findings()) {
      compare(first, outputs_of_run(request.seeds[0], 0xc3, program), "uninitialized-read",
              "locals without a value hold something else");
      compare(first, other, "order-dependent", "the threads run in another order");
    }
  }
  std::FILE* file = std::fopen(outputs_path, "wb");
  if (file == nullptr) return 4;
  for (const Bytes& bytes : first) {
    if (!bytes.empty()) std::fwrite(bytes.data(), 1, bytes.size(), file);
  }
  std::fclose(file);
  print_findings();
  std::printf("done\n");
  return 0;
}

Buffer* input_buffer(int number) { return request.inputs[number].buffer.get(); }
Buffer* output_buffer(int number) { return request.outputs[number].get(); }
Buffer* shape_buffer(int number) { return request.inputs[number].shape.get(); }
Buffer* strides_buffer(int number) { return request.inputs[number].strides.get(); }
const int& ndim(int number) { return request.inputs[number].ndim; }
const void* scalar_bytes(int number) {
  const Buffer& buffer = *request.inputs[number].buffer;
  return buffer.bytes.data() + buffer.origin;
}

namespace attribute {
metal::uint3 thread_position_in_grid() { return self->position.in_grid; }
metal::uint3 thread_position_in_threadgroup() { return self->position.in_group; }
metal::uint3 threadgroup_position_in_grid() { return self->position.group; }
metal::uint3 threads_per_threadgroup() { return self->position.group_size; }
metal::uint3 dispatch_threads_per_threadgroup() { return request.group; }
metal::uint3 threads_per_grid() { return request.grid; }
metal::uint3 grid_size() { return request.grid; }
metal::uint3 grid_origin() { return {0, 0, 0}; }
metal::uint3 threadgroups_per_grid() {
  const metal::uint3 g = request.grid, t = request.group;
  return {(g.x + t.x - 1) / t.x, (g.y + t.y - 1) / t.y, (g.z + t.z - 1) / t.z};
}
uint32_t thread_index_in_threadgroup() { return self->position.index; }
uint32_t thread_index_in_simdgroup() { return self->position.index % simd_width; }
uint32_t simdgroup_index_in_threadgroup() { return self->position.index / simd_width; }
uint32_t thread_index_in_quadgroup() { return self->position.index % 4; }
uint32_t quadgroup_index_in_threadgroup() { return self->position.index / 4; }
static uint32_t threads_in(metal::uint3 size) { return size.x * size.y * size.z; }
uint32_t simdgroups_per_threadgroup() {
  return (threads_in(self->position.group_size) + simd_width - 1) / simd_width;
}
uint32_t dispatch_simdgroups_per_threadgroup() {
  return (threads_in(request.group) + simd_width - 1) / simd_width;
}
uint32_t quadgroups_per_threadgroup() { return (threads_in(self->position.group_size) + 3) / 4; }
uint32_t dispatch_quadgroups_per_threadgroup() { return (threads_in(request.group) + 3) / 4; }
uint32_t thread_execution_width() { return simd_width; }
uint32_t threads_per_simdgroup() { return simd_width; }
} // namespace attribute

} // namespace host
