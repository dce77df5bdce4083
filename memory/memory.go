// Package memory is what an allocator tells of the memory of a device, as plain data: statistics, snapshots, what pools, tags,
// libraries and stacks use, the stages that reclaim memory, and the errors of requests that could not be met, with their text. It
// has no locks, and nothing in it refers to an allocator.
package memory
