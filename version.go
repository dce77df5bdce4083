package cistern

// Version is the version of the library, the C library, the commands and the Python package: everything else takes it
// from here, or is held against it by a test.
const Version = "0.4.0"
