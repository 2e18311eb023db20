// Package imports tests onceq import against the real queues that it takes jobs from.
package imports
