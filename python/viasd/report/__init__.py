"""What people read: terminal pictures, the demo, and the description of this installation."""
