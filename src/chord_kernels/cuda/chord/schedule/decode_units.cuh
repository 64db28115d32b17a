// SPDX-License-Identifier: Apache-2.0
// Which units of gate/up in warp decode a CTA has; a unit is kBlocks blocks of 16 paired rows of a group. Few units are dealt out in turn.
// Many are drawn, since groups have one token or eight, and SMs are not equally far from memory: CTAs then end together.
#pragma once
#include "chord/schedule/decode_groups.cuh"
#include "chord/tile/decode_ring.cuh"

namespace chord {

// Every ctas-th unit from number `cta` on, by its group and its place among the `units` of the group. Needs nothing of the routing.
struct UnitDeal {
  int units, group, at;
  int groups_each, units_each;  // from one to the next
  __device__ __forceinline__ UnitDeal(uint32_t units_of_group, uint32_t cta, uint32_t ctas) : units(static_cast<int>(units_of_group)) {
    group = static_cast<int>(cta / units_of_group), at = static_cast<int>(cta - group * units_of_group);
    groups_each = static_cast<int>(ctas / units_of_group), units_each = static_cast<int>(ctas - groups_each * units_of_group);
  }
  __device__ __forceinline__ void next() {
    group += groups_each, at += units_each;
    if (at >= units) at -= units, ++group;
  }
};

// A CTA's units, turn by turn. All threads construct it, call draw() once a turn before a barrier, and end() when no unit is valid.
// deal: of the CTA. stages: least number that a warp which has any copies for a unit.
template <class Config, bool kDraws = Config::kDraws != 0>
struct GateUpUnits;

template <class Config>
struct GateUpUnits<Config, false> {
  struct Storage {};
  using Group = DecodeGroup<Config::kTokens>;
  const DecodeGroups<Config>& groups;
  UnitDeal deal;
  int count;  // of groups

  __device__ __forceinline__ GateUpUnits(const DecodeGroups<Config>& g, Storage&, int32_t*, const UnitDeal& d, int) : groups(g), deal(d), count(g.count) {}
  __device__ __forceinline__ void draw() {}
  __device__ __forceinline__ void end() {}

  __device__ __forceinline__ bool valid() const { return deal.group < count; }
  __device__ __forceinline__ int later() const { return (count * deal.units - 1 - (deal.group * deal.units + deal.at)) / static_cast<int>(gridDim.x); }
  __device__ __forceinline__ void next() { deal.next(); }
  __device__ __forceinline__ int row() const { return deal.at * Config::kBlocks; }
  __device__ __forceinline__ Group group() const { return groups.groups[deal.group]; }
  __device__ __forceinline__ int row_of(int i) const { return groups.groups[deal.group].tokens[i]; }
};

// A CTA's first units follow from its number, the others from a counter in device memory, which is 0 before and after a launch: every unit
// is followed by one draw, so that the last draw is known. Thread 0 draws.
template <class Config>
struct GateUpUnits<Config, true> {
  using Group = DecodeGroup<Config::kTokens>;
  struct Unit {
    int32_t group;  // -1: none
    int32_t row;
  };
  static constexpr int kPlaces = Config::kStages + 3;
  struct Storage {
    Unit units[kPlaces];  // of turn t at t % kPlaces
  };
  const DecodeGroups<Config>& groups;
  Storage& storage;
  int32_t* counter;
  int units_of_group, units;
  uint32_t inverse;  // of units_of_group, two at least: the high half of its product with a unit's number is the quotient (plans see to it)
  int early;  // turns from a draw to the unit's own: a draw takes one, a barrier follows, and copies look for it kStages stages ahead of sums
  int turn = 0, place = 0;
  int drawn = -1;  // not put down yet

  __device__ __forceinline__ GateUpUnits(const DecodeGroups<Config>& g, Storage& s, int32_t* c, const UnitDeal& deal, int stages)
      : groups(g), storage(s), counter(c), units_of_group(deal.units), units(g.count * units_of_group), inverse(0xFFFFFFFFu / deal.units + 1) {
    early = 2 + (Config::kStages + max(stages, 1) - 1) / max(stages, 1);
    static_assert(kPlaces > 2 + Config::kStages, "a unit would take the place of one that is still in use");
    if (threadIdx.x < kPlaces) put(threadIdx.x, threadIdx.x < early ? blockIdx.x + threadIdx.x * gridDim.x : units);
    __syncthreads();
  }
  // What was drawn a turn ago can be read after the next barrier.
  __device__ __forceinline__ void draw() {
    if (!draws()) return;
    if (drawn >= 0) put((turn - 1 + early) % kPlaces, first_drawn() + drawn);
    end();
    drawn = draw_number(counter);
  }
  __device__ __forceinline__ void end() {
    if (draws() && drawn == units - 1) *counter = 0;  // the last draw of all CTAs
  }

  __device__ __forceinline__ bool valid() const { return storage.units[place].group >= 0; }
  __device__ __forceinline__ int later() const { return 0; }  // of a CTA's units after this one: nobody knows, and no plan asks
  __device__ __forceinline__ void next() { ++turn, place = place + 1 == kPlaces ? 0 : place + 1; }
  __device__ __forceinline__ int row() const { return storage.units[place].row; }
  __device__ __forceinline__ Group group() const { return groups.groups[storage.units[place].group]; }
  __device__ __forceinline__ int row_of(int i) const { return groups.groups[storage.units[place].group].tokens[i]; }

 private:
  __device__ __forceinline__ int first_drawn() const { return early * static_cast<int>(gridDim.x); }
  __device__ __forceinline__ bool draws() const { return threadIdx.x == 0 && units > first_drawn(); }
  __device__ __forceinline__ void put(int into, int number) {
    const int group = static_cast<int>(__umulhi(number, inverse));
    storage.units[into] = {group < groups.count ? group : -1, (number - group * units_of_group) * Config::kBlocks};
  }
};

}  // namespace chord
