// Which instruction set the kernels use. The build targets plain x86-64 (or any other machine); each kernel is compiled
// for several sets by function target attributes, and the best one that the machine has is chosen at run time.
#pragma once

#include <vector>

namespace headgate {

enum class Level : int { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

// The level in use; the machine's best until set_level.
Level level();
bool has_vpopcnt();

// For tests: every level up to the machine's best, and a switch between them.
std::vector<Level> levels();
void set_level(Level wanted);

}  // namespace headgate
