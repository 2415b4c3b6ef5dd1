//! The tracer: with small C programs, and with torch on the simulated GPU.

mod api;
mod capture;
mod detail;
mod driver;
mod examples;
mod integrations;
mod io;
mod owners;
mod python_versions;
mod retained;
mod settings;
mod tensor_types;
mod torch;
mod unharmed;
