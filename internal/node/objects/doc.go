// Package objects is named objects: device memory that outlives the process that wrote it, and that any number of processes map, for
// reading only. The broker of a node (internal/node/broker) keeps them.
//
// # Life of an object
//
// A process builds an object: the broker creates its memory and passes a descriptor of each chunk, which the process maps and writes.
// Commit makes the object visible under its name as a new generation, in place of the one before. A reader pins the generation that it
// gets. One that another has replaced, or that was removed, has no name any more, and its memory goes with the last pin. A build
// whose process ends before the commit leaves nothing.
//
// # Names
//
// Names are a user's own: two users may use the same name for two objects. Whoever reads an object of another user names that user,
// so no user can put an object in the place of another's.
//
// # The parts
//
// Store is the bookkeeping: names, generations, pins, rights and limits. It calls no driver and takes no lock; its methods return the
// generations whose memory is to be released, which the caller does without its lock. Memory is the chunks and descriptors of one
// generation. ParseLayout and AppendLayout read and write the list of tensors.
package objects
