"""ACL graphs: capture and replay, capture sizes, fusion passes."""
