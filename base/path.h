// Paths as users write them, and why a path leads to nothing.
#pragma once
#include <filesystem>
#include <string>

namespace train_gpt {

/// A path as a user writes it: "~" and "~/…" stand for the home folder, as in a shell. Throws Error
/// for "~NAME", the home folder of another user.
std::string expand_home(const std::string& path);

/// If a path leads to nothing because of a symbolic link: "LINK is a dangling symbolic link: its
/// target TARGET does not exist", or "… is a symbolic link that leads back to itself". Else empty.
std::string describe_broken_link(const std::filesystem::path& path);

}  // namespace train_gpt
