// Paths as users write them, why a path leads to nothing, and whether it leads to an open file.
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

/// Whether a path leads to the file or folder that is open as `descriptor`: no longer after it was
/// removed, renamed or replaced, or a folder above it was.
bool leads_to(const std::filesystem::path& path, int descriptor);
/// Where the file or folder that is open as `descriptor` is now; empty if it was removed.
std::filesystem::path place_of(int descriptor);

}  // namespace train_gpt
