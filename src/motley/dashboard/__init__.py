"""The page that shows a crew: reads run folders and logs, and writes nothing."""
