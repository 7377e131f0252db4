"""The sans-I/O engine: operations in, frames out. Imports no asyncio, socket, threading, time, random or torch."""
