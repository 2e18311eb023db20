//go:build unix && !linux

package pgserver

// memoryDir is empty: only Linux has a directory in memory that is there without being asked for.
func memoryDir() string { return "" }
