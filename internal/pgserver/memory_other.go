//go:build unix && !linux

package pgserver

// memoryDir returns "": only Linux has a directory in memory by default.
func memoryDir() string { return "" }
