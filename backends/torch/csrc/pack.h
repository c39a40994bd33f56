// Packs the tensors of a call into as few tables, and so launches, as can hold them.
#pragma once

#include <algorithm>
#include <vector>

#include "update_rules.h"

namespace polyamp {

template <int Streams>
struct Item {
  void* data[Streams];
  int64_t numel;
  int64_t tag;  // its group in the call, or its format
};

template <class Tensors>
bool has_room(const Tensors& tensors) {
  return tensors.count < Tensors::kCapacity && tensors.first[tensors.count] < 1u << 31;  // so that chunks fit 32 bits
}

template <int Streams, int Capacity, int Sweeps>
void append(Tensors<Streams, Capacity, Sweeps>& tensors, const Item<Streams>& item, uint8_t tag) {
  const uint32_t at = tensors.count++;
  const int64_t chunk = tensors.kChunk, chunks = (item.numel + chunk - 1) / chunk;
  for (int stream = 0; stream < Streams; ++stream) tensors.data[stream][at] = item.data[stream];
  tensors.first[at + 1] = tensors.first[at] + static_cast<uint32_t>(chunks);
  tensors.last[at] = static_cast<uint16_t>(chunks > 0 ? item.numel - (chunks - 1) * chunk : 0);
  tensors.tag[at] = tag;
}

// Copies of `blank`, which has no tensors; at least one, for the other work of a launch.
inline std::vector<GradTable> pack(const GradTable& blank, const std::vector<Item<1>>& items) {
  std::vector<GradTable> tables{blank};
  for (const auto& item : items) {
    if (!has_room(tables.back().tensors)) tables.push_back(blank);
    append(tables.back().tensors, item, static_cast<uint8_t>(item.tag));
  }
  return tables;
}

// In the order of their launches: the last tensors first. A table only has its tensors' groups.
template <class Rule, int Streams>
std::vector<StepTable<Rule>> pack(const StepTable<Rule>& blank, const std::vector<Item<Streams>>& items,
                                  const std::vector<typename Rule::Group>& groups) {
  std::vector<StepTable<Rule>> tables{blank};
  std::vector<int64_t> chosen;  // groups of the last table
  for (size_t i = 0; i < items.size(); ++i) {
    const auto known = std::find(chosen.begin(), chosen.end(), items[i].tag);
    const bool fits = known != chosen.end() || chosen.size() < StepTable<Rule>::kGroups;
    if (!fits || !has_room(tables.back().tensors)) {
      tables.push_back(blank);
      chosen.clear();
    }
    const size_t group = std::find(chosen.begin(), chosen.end(), items[i].tag) - chosen.begin();
    if (group == chosen.size()) {
      tables.back().groups[tables.back().group_count++] = groups[items[i].tag];
      chosen.push_back(items[i].tag);
    }
    append(tables.back().tensors, items[i], static_cast<uint8_t>(group));
  }
  std::reverse(tables.begin(), tables.end());
  tables.back().is_last = true;
  return tables;
}

}  // namespace polyamp
