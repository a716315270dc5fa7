//! The examples do what they say, and what they say is as it is in the documentation.

#[path = "../examples/first.rs"]
mod first;
#[path = "../examples/tickets.rs"]
mod tickets;

#[test]
fn the_first_example_makes_a_volume_and_finds_it_again() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("vol.img");
    let rest = ["from byte 6 on: \"world\\n\"", "mail/2026/1: File, 12 bytes"];
    let said = first::run(&image).unwrap();
    assert_eq!(said[0], "a new volume");
    assert_eq!(said[1..], rest);
    let said = first::run(&image).unwrap();
    assert!(said[0].starts_with("the volume that is there ("), "{}", said[0]);
    assert_eq!(said[1..], rest);
    // what stands in its way is no volume
    std::fs::write(&image, "not a volume").unwrap();
    assert!(first::run(&image).is_err());
}

#[test]
fn tickets_are_waited_for_called_and_awaited() {
    assert_eq!(tickets::run().unwrap(), ["16 waited for", "16 called", "29 bytes awaited"]);
}
