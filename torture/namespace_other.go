//go:build !linux

package main

import "syscall"

func inNamespace() *syscall.SysProcAttr { return nil }
