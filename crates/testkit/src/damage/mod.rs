//! Damage: every metadata block of a small volume spoilt in every way, and what becomes of the files.
//!
//! [`sample`] makes the volumes, with images of them as they once were; [`truth`] says what their files hold;
//! [`target`] lists the metadata blocks, [`inflict`] spoils them; [`trial`] mounts, reads, writes, checks and repairs one
//! spoilt volume and judges, by what was [`named`]; [`matrix`] does that for all of them and counts.
//!
//! The rule: a mount shows what is right, or an error. What a repair gives up it names. What is neither is *silent*.

pub mod inflict;
pub mod matrix;
pub mod named;
pub mod sample;
pub mod target;
pub mod trial;
pub mod truth;
