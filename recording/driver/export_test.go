package driver

// What the tests outside of the package need.
const ResultOutOfMemory = resultOutOfMemory
