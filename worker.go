package onceq

type task struct{}
