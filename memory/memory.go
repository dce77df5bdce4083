// Package memory is what an allocator tells of the memory of a device, as plain data: statistics, snapshots, what pools, tags,
// libraries and stacks use, the stages that reclaim memory, the errors of requests that could not be met, with their text, and
// the description of memory that processes share. It has no locks, and nothing in it refers to an allocator.
package memory
